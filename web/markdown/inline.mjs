// What Markdown has inside a line: code, emphasis, links, formulas. A mark without its partner is
// text; while text is growing, one that is open at the end counts as closed there.

import { safeAddress, trimmedAddress } from "./links.mjs";

/**
 * @typedef {string
 *         | {kind: "code" | "strong" | "em" | "del", children: Inline[]}
 *         | {kind: "link", address: string, children: Inline[]}
 *         | {kind: "math", text: string}} Inline
 */

const MAX_DEPTH = 4;
const MAX_FORMULA_CHARACTERS = 2000;
const MARK = new RegExp(
  [
    "(?<ticks>`+)",
    "(?<strong>\\*\\*|__)",
    "(?<del>~~)",
    "(?<em>[*_])",
    "(?<formula>\\\\\\(|\\\\\\[|\\$\\$?)",
    "(?<bracket>!?\\[)",
    "(?<address><?https?://)",
    "(?<newline><br ?/?>)",
    "\\\\(?<escaped>[\\\\`*_#[\\]()<>~>+.!$|{}-])",
  ].join("|"),
  "g",
);
const KINDS = /** @type {const} */ ({ "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" });
const LINK = /(!?)\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/y;
const LINK_BEGINS = /!?\[((?:[^[\]\\]|\\.)+)\]\(<?h[^\s<>]*$/y;
const ADDRESS = /https?:\/\/[^\s<>"`|\\]+/y;

/**
 * Read a line's, or a paragraph's, text.
 * @param {string} text
 * @param {boolean} [growing] whether more text is expected behind it
 * @param {number} [depth]
 * @returns {Inline[]}
 */
export function readInline(text, growing = false, depth = 0) {
  /** @type {Inline[]} */
  const found = [];
  let plain = "";
  let at = 0;
  for (;;) {
    MARK.lastIndex = at;
    const match = MARK.exec(text);
    if (!match) break;
    plain += text.slice(at, match.index);
    const read = readMark(text, match, growing, depth);
    at = read.end;
    if (typeof read.inline === "string") {
      plain += read.inline;
      continue;
    }
    if (plain) found.push(plain);
    plain = "";
    found.push(read.inline);
  }
  plain += text.slice(at);
  if (plain) found.push(plain);
  return found;
}

/**
 * @param {string} text @param {RegExpExecArray} match @param {boolean} growing @param {number} depth
 * @returns {{inline: Inline, end: number}}
 */
function readMark(text, match, growing, depth) {
  const { ticks, formula, bracket, address, newline, escaped } = match.groups ?? {};
  const [mark, at] = [match[0], match.index];
  let read = null;
  if (escaped !== undefined) return { inline: escaped, end: at + mark.length };
  if (newline) return { inline: "\n", end: at + mark.length };
  if (ticks) read = readCode(text, at, ticks, growing);
  else if (formula) read = readFormula(text, at, formula, growing) ?? unescaped(formula, at);
  else if (bracket) read = readLink(text, at, growing, depth);
  else if (address) read = readAddress(text, at, mark);
  else read = readEmphasis(text, at, /** @type {keyof KINDS} */ (mark), growing, depth);
  return read ?? { inline: mark, end: at + mark.length };
}

/** @param {string} mark @param {number} at */
function unescaped(mark, at) {
  return mark[0] === "\\" ? { inline: mark[1], end: at + 2 } : null;
}

/** @param {string} text @param {number} at @param {string} ticks @param {boolean} growing */
function readCode(text, at, ticks, growing) {
  const from = at + ticks.length;
  let end = text.indexOf(ticks, from);
  let after = end + ticks.length;
  while (end >= 0) {
    after = end;
    while (text[after] === "`") after += 1;
    if (after - end === ticks.length) break;
    end = text.indexOf(ticks, after);
  }
  if (end < 0) {
    if (!growing || from >= text.length) return null;
    end = after = text.length;
  }
  const inner = text.slice(from, end).replace(/^ (.*\S.*) $/, "$1");
  return { inline: /** @type {Inline} */ ({ kind: "code", children: [inner] }), end: after };
}

/**
 * Read a formula; a single dollar must touch it on the inside, and no word or number on the outside,
 * or it is money or a shell's variable.
 * @param {string} text @param {number} at @param {string} mark @param {boolean} growing
 */
function readFormula(text, at, mark, growing) {
  const from = at + mark.length;
  const isDollar = mark === "$";
  if (isDollar && (!/\S/.test(text[from] ?? "") || /[\w$]/.test(text[at - 1] ?? ""))) return null;
  const closing = mark === "\\(" ? "\\)" : mark === "\\[" ? "\\]" : mark;
  let end = text.indexOf(closing, from);
  while (end >= 0 && isDollar && !(/[^\s\\]/.test(text[end - 1]) && !/[\w$]/.test(text[end + 1] ?? ""))) {
    end = text.indexOf(closing, end + 1);
  }
  let after = end + closing.length;
  if (end < 0) {
    if (!growing || (isDollar && text[from] !== "\\") || from >= text.length) return null;
    end = after = text.length;
  }
  if (end - from > MAX_FORMULA_CHARACTERS || !text.slice(from, end).trim()) return null;
  return { inline: /** @type {Inline} */ ({ kind: "math", text: text.slice(from, end).trim() }), end: after };
}

/** @param {string} text @param {number} at @param {boolean} growing @param {number} depth */
function readLink(text, at, growing, depth) {
  if (depth >= MAX_DEPTH) return null;
  LINK.lastIndex = at;
  const match = LINK.exec(text);
  if (match) {
    const address = safeAddress(match[3]);
    if (!address) return null;
    const label = match[2].trim() ? readInline(match[2], false, MAX_DEPTH - 1) : [match[3]];
    const children = match[1] ? ["🖼 ", ...label] : label; // pictures are not loaded, only linked
    return { inline: /** @type {Inline} */ ({ kind: "link", address, children }), end: LINK.lastIndex };
  }
  LINK_BEGINS.lastIndex = at;
  const begun = growing ? LINK_BEGINS.exec(text) : null;
  if (!begun) return null;
  const children = readInline(begun[1], false, MAX_DEPTH - 1);
  return { inline: /** @type {Inline} */ ({ kind: "link", address: "", children }), end: text.length };
}

/** @param {string} text @param {number} at @param {string} mark */
function readAddress(text, at, mark) {
  const isBracketed = mark[0] === "<";
  if (!isBracketed && /\w/.test(text[at - 1] ?? "")) return null;
  ADDRESS.lastIndex = isBracketed ? at + 1 : at;
  const found = ADDRESS.exec(text)?.[0] ?? "";
  const isClosed = isBracketed && text[ADDRESS.lastIndex] === ">";
  if (isBracketed && !isClosed) return null;
  const shown = isClosed ? found : trimmedAddress(found);
  const address = safeAddress(shown);
  const end = isClosed ? at + found.length + 2 : at + shown.length;
  return address ? { inline: /** @type {Inline} */ ({ kind: "link", address, children: [shown] }), end } : null;
}

/**
 * @param {string} text @param {number} at @param {keyof KINDS} mark
 * @param {boolean} growing @param {number} depth
 */
function readEmphasis(text, at, mark, growing, depth) {
  const from = at + mark.length;
  if (depth >= MAX_DEPTH || !/\S/.test(text[from] ?? "")) return null;
  if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) return null;
  let end = closing(text, mark, from);
  const isOpen = end < 0;
  if (isOpen) {
    // Open at the end, and at a word's beginning: `2 *3` and `a*b` are rather sums.
    if (!growing || !/[\p{L}`"'([]/u.test(text[from]) || /[^\s(["']/.test(text[at - 1] ?? " ")) return null;
    end = text.length;
  }
  let inner = text.slice(from, end);
  if (isOpen && mark.length === 2 && inner.endsWith(mark[0])) inner = inner.slice(0, -1); // half its end
  const children = readInline(inner, isOpen, depth + 1);
  const inline = /** @type {Inline} */ ({ kind: KINDS[mark], children });
  return { inline, end: isOpen ? text.length : end + mark.length };
}

/**
 * Find where emphasis ends, -1 where the mark is none: `2 * 3`, `snake_case`, `**` at a line's end.
 * @param {string} text @param {string} mark @param {number} from
 */
function closing(text, mark, from) {
  let end = text.indexOf(mark, from + 1);
  while (end >= 0) {
    const after = text[end + mark.length] ?? "";
    const inside = /\S/.test(text[end - 1]) && (mark[0] !== "_" || !/\w/.test(after));
    if (inside && mark.length === 2) return after[0] === mark[0] ? end + 1 : end; // **a *b***
    if (inside && after !== mark && text[end - 1] !== mark) return end;
    end = text.indexOf(mark, end + 1);
  }
  return -1;
}
