// The blocks of Markdown as a tree of plain objects: code, headings, lists, quotes, tables, formulas.
// HTML stays text. Whoever draws the tree makes text nodes of all text.

import { readInline } from "./inline.mjs";
import { beginsTable, readTable } from "./table.mjs";

/**
 * @typedef {import("./inline.mjs").Inline} Inline
 * @typedef {{kind: "code", language: string, text: string, open: boolean}
 *         | {kind: "heading", level: number, children: Inline[]}
 *         | {kind: "paragraph", children: Inline[]}
 *         | {kind: "quote", blocks: Block[]}
 *         | {kind: "list", ordered: boolean, start: number, items: Block[][]}
 *         | {kind: "math", text: string}
 *         | {kind: "table", align: string[], head: Inline[][], rows: Inline[][][]}
 *         | {kind: "rule"}} Block
 * @typedef {{depth: number, growing: boolean, isLast: boolean}} Way how deep a block lies, whether more
 *          lines are to come after these, and whether the block is known to be the last of them: marks
 *          that are open at its end will be closed by what comes
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +)(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const FORMULA = /^ {0,3}(\$\$|\\\[|\\begin\{(equation|align|gather|multline|cases|[pbvBV]?matrix)(\*?)\})/;
const MAX_FORMULA_LINES = 200;
const MAX_DEPTH = 8; // of lists and quotes in one another; what is deeper stays text

/**
 * Read the blocks of a text. `open` is where that begins which more text can change, after `numClosed`
 * blocks: a stream needs to read only from there on.
 * @param {string} text
 * @param {boolean} [growing] whether more text is expected
 * @returns {{blocks: Block[], open: number, numClosed: number}}
 */
export function readBlocks(text, growing = false) {
  const lines = text.split("\n");
  const { blocks, firsts, ends } = read(lines, { depth: 0, growing, isLast: false });
  const numClosed = countClosed(lines, blocks, firsts, ends);
  let open = 0;
  for (const line of lines.slice(0, firsts[numClosed] ?? 0)) open += line.length + 1;
  return { blocks, open, numClosed };
}

/**
 * Count the blocks that no further text can change. Blocks without an empty line between them may
 * yet become one, unless the last is code; and a line after a list may turn out to be an item.
 * @param {string[]} lines @param {Block[]} blocks @param {number[]} firsts @param {number[]} ends
 */
function countClosed(lines, blocks, firsts, ends) {
  const last = blocks.length - 1;
  if (last < 0) return 0;
  const isUnfinished = firsts[last] === lines.length - 1;
  if (blocks[last].kind === "code" && !isUnfinished) return last;
  let first = last;
  while (first > 0 && firsts[first] === ends[first - 1]) first -= 1;
  if (first > 0 && blocks[first - 1].kind === "list" && firsts[first] === lines.length - 1) first -= 1;
  return first;
}

/** @param {string[]} lines @param {Way} way */
function read(lines, way) {
  /** @type {Block[]} */
  const blocks = [];
  /** @type {number[]} */
  const firsts = []; // the line on which each block begins
  /** @type {number[]} */
  const ends = []; // the line after it
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    firsts.push(at);
    const [block, next] = readBlock(lines, at, { ...way, isLast: false });
    blocks.push(block);
    ends.push(next);
    at = next;
  }
  const last = blocks.length - 1;
  if (way.growing && last >= 0) blocks[last] = readBlock(lines, firsts[last], { ...way, isLast: true })[0];
  return { blocks, firsts, ends };
}

/** @param {string[]} lines @param {number} at @param {Way} way @returns {[Block, number]} */
function readBlock(lines, at, way) {
  const line = lines[at];
  const isOpen = way.growing && way.isLast;
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, at, fence[1], fence[2]);
  const heading = HEADING.exec(line);
  if (heading) {
    return [{ kind: "heading", level: heading[1].length, children: readInline(heading[2], isOpen) }, at + 1];
  }
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (way.depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, way);
  if (way.depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, way);
  const formula = readFormula(lines, at, way.growing);
  if (formula) return formula;
  if (beginsTable(lines, at, isOpen)) {
    const end = endOfText(lines, at + 2, way.depth);
    return [readTable(lines.slice(at, end), isOpen), end];
  }
  let end = at + 1;
  const last = endOfText(lines, end, way.depth);
  while (end < last && !beginsTable(lines, end, false) && !readFormula(lines, end, way.growing)) end += 1;
  const text = lines.slice(at, end).join("\n");
  return [{ kind: "paragraph", children: readInline(text.trim(), isOpen) }, end];
}

/** @param {string[]} lines @param {number} at @param {number} depth */
function endOfText(lines, at, depth) {
  let end = at;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end], depth)) end += 1;
  return Math.min(end, lines.length);
}

/** @param {string} line @param {number} depth */
function interrupts(line, depth) {
  if (FENCE.test(line) || HEADING.test(line)) return true;
  return depth < MAX_DEPTH && (ITEM.test(line) || QUOTE.test(line));
}

/**
 * @param {string[]} lines @param {number} at @param {string} mark @param {string} language
 * @returns {[Block, number]}
 */
function readCode(lines, at, mark, language) {
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  return [{ kind: "code", language, text, open: end >= lines.length }, end + 1];
}

/**
 * Read a formula that has its lines to itself; null where there is none, or where an empty line
 * or a fence comes before its end.
 * @param {string[]} lines @param {number} at @param {boolean} growing
 * @returns {[Block, number] | null}
 */
function readFormula(lines, at, growing) {
  const opening = FORMULA.exec(lines[at]);
  if (!opening) return null;
  const isEnvironment = opening[2] !== undefined;
  const mark = isEnvironment ? `\\end{${opening[2]}${opening[3]}}` : opening[1] === "$$" ? "$$" : "\\]";
  const from = isEnvironment ? opening[0].length - opening[1].length : opening[0].length;
  const most = Math.min(lines.length, at + MAX_FORMULA_LINES);
  let text = "";
  for (let end = at; end < most; end += 1) {
    if (end > at && (!lines[end].trim() || FENCE.test(lines[end]))) return null;
    const line = end === at ? lines[end].slice(from) : lines[end];
    const close = line.indexOf(mark);
    if (close >= 0) {
      const after = line.slice(close + mark.length);
      if (!/^\s*[.,;]?\s*$/.test(after)) return null; // words go on behind it: part of a paragraph
      return [{ kind: "math", text: (text + line.slice(0, close)).trim() + (isEnvironment ? mark : after.trim()) }, end + 1];
    }
    text += `${line}\n`;
    if (end === lines.length - 1 && growing) return [{ kind: "math", text: text.trim() }, end + 1];
  }
  return null;
}

/** @param {string[]} lines @param {number} at @param {Way} way @returns {[Block, number]} */
function readQuote(lines, at, way) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ kind: "quote", blocks: read(inside, nested(way, true)).blocks }, end];
}

/** @param {string[]} lines @param {number} at @param {Way} way @returns {[Block, number]} */
function readList(lines, at, way) {
  const first = /** @type {RegExpExecArray} */ (ITEM.exec(lines[at]));
  const ordered = first[2].length > 1;
  /** @type {string[][]} */
  const items = [];
  let end = at;
  for (;;) {
    const match = end < lines.length ? ITEM.exec(lines[end]) : null;
    if (!match || match[2].length > 1 !== ordered || RULE.test(lines[end])) break;
    const indent = match[0].length;
    const own = [lines[end].slice(indent)];
    end += 1;
    while (end < lines.length && belongs(lines, end, indent)) {
      own.push(lines[end].slice(Math.min(indent, lines[end].search(/\S|$/))));
      end += 1;
    }
    items.push(own);
    let after = end;
    while (after < lines.length && !lines[after].trim()) after += 1;
    if (after < lines.length && ITEM.test(lines[after])) end = after;
  }
  const contents = items.map((item, index) => read(item, nested(way, index === items.length - 1)).blocks);
  return [{ kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items: contents }, end];
}

/** The way to read what is in a block. @param {Way} way @param {boolean} isEnd whether it is at the block's end */
function nested(way, isEnd) {
  return { depth: way.depth + 1, growing: way.growing && way.isLast && isEnd, isLast: false };
}

/**
 * Whether a line goes on with the item before it: indented under its text, or lazily next to it.
 * @param {string[]} lines @param {number} at @param {number} indent
 */
function belongs(lines, at, indent) {
  const line = lines[at];
  const column = line.search(/\S/);
  if (column < 0) {
    let after = at;
    while (after < lines.length && !lines[after].trim()) after += 1;
    return after < lines.length && lines[after].search(/\S/) >= Math.min(indent, 2);
  }
  if (column >= Math.min(indent, 2)) return true;
  return Boolean(lines[at - 1].trim()) && !interrupts(line, 0) && !RULE.test(line);
}
