// Tables of Markdown: a head, a line of dashes, rows. What a row has too much of is kept, not cut.

import { readInline } from "./inline.mjs";

const RULER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const RULER_BEGINS = /^ {0,3}\|?[ \t:|-]*$/;
const HEAD_BEGINS = /^ {0,3}\|[^|]/;
const MAX_COLUMNS = 64;

/**
 * Whether a table's head stands here. While text comes, a line that begins with a bar is one
 * already, so that it does not change its looks when the dashes follow.
 * @param {string[]} lines @param {number} at @param {boolean} growing
 */
export function beginsTable(lines, at, growing) {
  const [head, ruler] = [lines[at], lines[at + 1]];
  if (!head.includes("|")) return false;
  const isEnd = at + 2 >= lines.length;
  if (growing && isEnd && HEAD_BEGINS.test(head) && RULER_BEGINS.test(ruler ?? "")) return true;
  return ruler !== undefined && ruler.includes("-") && RULER.test(ruler) && cells(head).length === cells(ruler).length;
}

/**
 * Read the lines of a table.
 * @param {string[]} lines @param {boolean} growing
 * @returns {Extract<import("./blocks.mjs").Block, {kind: "table"}>}
 */
export function readTable(lines, growing) {
  const texts = [lines[0], ...lines.slice(2)].map(cells);
  const numColumns = Math.min(MAX_COLUMNS, Math.max(...texts.map((row) => row.length)));
  const ruler = cells(lines[1] ?? "");
  const align = Array.from({ length: numColumns }, (_, column) => alignOf(ruler[column] ?? ""));
  const rows = texts.map((row, index) => {
    const isLast = growing && index === texts.length - 1;
    const all = [...row.slice(0, numColumns - 1), row.slice(numColumns - 1).join(" | ")];
    while (all.length < numColumns) all.push("");
    return all.map((text) => readInline(text, isLast));
  });
  return { kind: "table", align, head: rows[0], rows: rows.slice(1) };
}

/** @param {string} line */
function cells(line) {
  const found = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (found.length > 1 && !found[found.length - 1].trim()) found.pop(); // behind the last bar
  return found.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** @param {string} ruler */
function alignOf(ruler) {
  const [left, right] = [ruler.startsWith(":"), ruler.endsWith(":")];
  return left && right ? "center" : right ? "end" : "start";
}
