// An answer's Markdown as DOM nodes. Nothing in it can run: text goes in as text, and
// links lead to http, https and mailto only. `parse` is pure, `toNodes` builds.

/**
 * @typedef {string | {tag: string, children: Node_[], href?: string, lang?: string}} Node_
 */

// No backtick after a fence of them: that is code within a line.
const FENCE = /^\s*(`{3,}(?!.*`)|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)(?:([-*+•])|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*)$/;
const HEADING_END = /(?<!\S)#+$/;
const RULE = /^\s{0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const DEEPEST = 20; // of quotes and emphasis within each other

/**
 * @param {string} markdown
 * @returns {Node_[]}
 */
export function parse(markdown) {
  return blocks(markdown.replaceAll("\r\n", "\n").split("\n"), 0);
}

/** @param {string[]} lines @param {number} depth @returns {Node_[]} */
function blocks(lines, depth) {
  /** @type {Node_[]} */
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at, depth);
    if (node) found.push(node);
    at = next;
  }
  return found;
}

/** One block from a line on, and the line after it. @param {string[]} lines @param {number} at @param {number} depth @returns {[Node_ | null, number]} */
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence[1], fence[2]);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = heading[2].trim().replace(HEADING_END, "").trim();
    return [{ tag: `h${Math.min(6, heading[1].length + 2)}`, children: inline(text) }, at + 1];
  }
  if (RULE.test(line)) return [{ tag: "hr", children: [] }, at + 1];
  if (/^\s*>/.test(line) && depth < DEEPEST) return quote(lines, at, depth);
  if (ITEM.test(line)) return list(lines, at);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at);
}

/** @param {string[]} lines @param {number} at @param {string} fence @param {string} lang @returns {[Node_, number]} */
function code(lines, at, fence, lang) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(fence) && !lines[end].trim().replaceAll(fence[0], ""))) end += 1;
  const indent = new RegExp(`^\\s{0,${lines[at].search(/\S/)}}`);
  const text = lines.slice(at + 1, end).map((line) => line.replace(indent, "")).join("\n");
  return [{ tag: "pre", children: [{ tag: "code", children: [text], lang }] }, end + 1];
}

/** @param {string[]} lines @param {number} at @param {number} depth @returns {[Node_, number]} */
function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^\s*>/.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^\s*>\s?/, ""));
  return [{ tag: "blockquote", children: blocks(inner, depth + 1) }, end];
}

/** A list; deeper items become lists inside the item before. @param {string[]} lines @param {number} at @returns {[Node_, number]} */
function list(lines, at) {
  const first = /** @type {RegExpExecArray} */ (ITEM.exec(lines[at]));
  const indent = first[1].length;
  const root = /** @type {{tag: string, children: any[]}} */ ({ tag: first[3] ? "ol" : "ul", children: [] });
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    const fence = FENCE.exec(lines[at]);
    const last = root.children.at(-1);
    if (item && item[1].length > indent + 1 && last) {
      const [inner, next] = list(lines, at);
      last.children.push(inner);
      at = next;
    } else if (item && item[1].length >= indent && !!item[3] === (root.tag === "ol")) {
      root.children.push({ tag: "li", children: inline(item[4]) });
      at += 1;
    } else if (!lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) {
      at += 1;
    } else if (fence && /^\s{2,}/.test(lines[at]) && last) {
      const [inner, next] = code(lines, at, fence[1], fence[2]);
      last.children.push(inner);
      at = next;
    } else if (!item && lines[at].trim() && /^\s{2,}/.test(lines[at]) && last) {
      last.children.push(" ", ...inline(lines[at].trim()));
      at += 1;
    } else break;
  }
  return [root, at];
}

/** A line with cells above a line of dashes. @param {string[]} lines @param {number} at */
function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && cells(lines[at + 1]).every((cell) => /^:?-+:?$/.test(cell));
}

/** @param {string[]} lines @param {number} at @returns {[Node_, number]} */
function table(lines, at) {
  const head = cells(lines[at]).map((text) => ({ tag: "th", children: inline(text) }));
  const rows = [{ tag: "tr", children: head }];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) {
    rows.push({ tag: "tr", children: cells(lines[end]).map((text) => ({ tag: "td", children: inline(text) })) });
    end += 1;
  }
  return [{ tag: "table", children: rows }, end];
}

/** @param {string} line */
function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** @param {string[]} lines @param {number} at @returns {[Node_, number]} */
function paragraph(lines, at) {
  let end = at + 1;
  const more = (/** @type {string} */ line) => line.trim() && ![FENCE, HEADING, RULE, ITEM, /^\s*>/].some((start) => start.test(line));
  while (end < lines.length && more(lines[end]) && !isTable(lines, end)) end += 1;
  const children = lines.slice(at, end).flatMap((line, n) => [...(n ? [{ tag: "br", children: [] }] : []), ...inline(line.trim())]);
  return [{ tag: "p", children }, end];
}

// What is not closed soon is plain text: to search on for its end could take for ever.
const INLINE = new RegExp(
  [
    "(?<code>(?<!`)(?<ticks>`+)(?!`)(?<inside>.{1,1000}?)(?<!`)\\k<ticks>(?!`))",
    "(?<link>!?\\[(?<label>[^[\\]]*)\\]\\((?<target>[^()\\s]+(?:\\([^()\\s]*\\))?)(?:\\s+\"[^\"]*\")?\\))",
    "(?<url>\\bhttps?://[^\\s<>\"')\\]]+[^\\s<>\"')\\].,;:!?])",
    "(?<strong>(?<stars>\\*\\*|__)(?=\\S)(?<bold>.{1,300}?)(?<=\\S)\\k<stars>)",
    "(?<em>(?<![\\w*])(?<star>[*_])(?=\\S)(?<italic>[^*_]+?)(?<=\\S)\\k<star>(?![\\w*]))",
    "(?<del>~~(?=\\S)(?<struck>.{1,300}?)(?<=\\S)~~)",
    "(?<escaped>\\\\(?<character>[\\\\`*_{}[\\]()#+.!|~>-]))",
  ].join("|"),
);

/** @param {string} text @param {number} [depth] @returns {Node_[]} */
function inline(text, depth = 0) {
  /** @type {Node_[]} */
  const found = [];
  let rest = text;
  while (rest) {
    const match = depth < DEEPEST ? INLINE.exec(rest) : null;
    if (!match) return [...found, rest];
    if (match.index) found.push(rest.slice(0, match.index));
    found.push(...span(match.groups ?? {}, depth));
    rest = rest.slice(match.index + match[0].length);
  }
  return found;
}

/** @param {Record<string, string | undefined>} groups @param {number} depth @returns {Node_[]} */
function span(groups, depth) {
  if (groups.code) return [{ tag: "code", children: [(groups.inside ?? "").trim()] }];
  if (groups.link) return anchor(groups.target ?? "", inline(groups.label || groups.target || "", depth + 1));
  if (groups.url) return anchor(groups.url, [groups.url]);
  if (groups.strong) return [{ tag: "strong", children: inline(groups.bold ?? "", depth + 1) }];
  if (groups.em) return [{ tag: "em", children: inline(groups.italic ?? "", depth + 1) }];
  if (groups.del) return [{ tag: "del", children: inline(groups.struck ?? "", depth + 1) }];
  return [groups.character ?? ""];
}

/** @param {string} href @param {Node_[]} children @returns {Node_[]} */
function anchor(href, children) {
  return /^(?:https?:\/\/|mailto:)/i.test(href) ? [{ tag: "a", href, children }] : children;
}

/**
 * @param {Node_[]} tree
 * @returns {DocumentFragment}
 */
export function toNodes(tree) {
  const fragment = document.createDocumentFragment();
  for (const node of tree) fragment.append(typeof node === "string" ? node : element(node));
  return fragment;
}

/** @param {Exclude<Node_, string>} node */
function element(node) {
  const made = document.createElement(node.tag);
  if (node.href !== undefined && made instanceof HTMLAnchorElement) {
    made.href = node.href;
    made.target = "_blank";
    made.rel = "noopener noreferrer";
  }
  made.append(toNodes(node.children));
  return made;
}
