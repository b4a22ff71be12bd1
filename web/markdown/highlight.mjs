// Colours code line by line: one pattern a language finds what has a colour, and what goes over
// several lines (comments, long strings) is remembered, so that a stream reads each line once.

import { languageOf } from "./languages.mjs";

/** @typedef {[kind: string, text: string]} Token `kind` is "" where the text has no colour */

const MAX_LINE_CHARACTERS = 2000; // longer lines are data, not code
const WORD = "[A-Za-z_$][\\w$]*";
const NUMBER = "\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d[\\d_]*)?(?:[eE][+-]?\\d+)?)\\w*";

/** @type {Map<import("./languages.mjs").Language, RegExp>} */
const PATTERNS = new Map();

export class Highlighter {
  /** @type {[close: string, kind: string] | null} What the last line left open. */
  #inside = null;

  /** @param {string} language as it stands behind the fence */
  constructor(language) {
    this.language = languageOf(language);
    this.pattern = this.language && patternOf(this.language);
  }

  /** A second one that goes on from here, for a line that may not be complete yet. */
  copy() {
    const other = new Highlighter("");
    other.language = this.language;
    other.pattern = this.pattern;
    other.#inside = this.#inside;
    return other;
  }

  /** Take one line, without its end. @param {string} line @returns {Token[]} */
  line(line) {
    if (!this.language || !this.pattern || line.length > MAX_LINE_CHARACTERS) return line ? [["", line]] : [];
    /** @type {Token[]} */
    const found = [];
    let at = this.#inside ? this.#goOn(line, 0, found) : 0;
    let plain = at;
    while (at < line.length) {
      this.pattern.lastIndex = at;
      const match = this.pattern.exec(line);
      if (!match) break;
      const [text] = match;
      const name = Object.keys(match.groups ?? {}).find((group) => match.groups?.[group] !== undefined) ?? "";
      if (name.startsWith("span")) {
        if (match.index > plain) found.push(["", line.slice(plain, match.index)]);
        const [open, close, kind] = /** @type {[string, string, string]} */ (this.language.spans?.[Number(name.slice(4))]);
        this.#inside = [close, kind];
        at = plain = this.#goOn(line, match.index, found, open.length);
        continue;
      }
      const kind = name === "word" ? this.#kindOf(text, line[match.index + text.length] ?? "") : name.replace(/\d+$/, "");
      at = match.index + Math.max(1, text.length);
      if (!kind || kind === "plain" || !text) continue;
      if (match.index > plain) found.push(["", line.slice(plain, match.index)]);
      found.push([kind, text]);
      plain = at;
    }
    if (plain < line.length) found.push(["", line.slice(plain)]);
    return found;
  }

  /**
   * Go on with what is open, from `at`; returns where it ends.
   * @param {string} line @param {number} at @param {Token[]} found @param {number} [skip]
   */
  #goOn(line, at, found, skip = 0) {
    const [close, kind] = this.#inside ?? ["", ""];
    let end = line.indexOf(close, at + skip);
    while (end > 0 && line[end - 1] === "\\" && kind === "string") end = line.indexOf(close, end + 1);
    if (end < 0) {
      if (at < line.length) found.push([kind, line.slice(at)]);
      return line.length;
    }
    this.#inside = null;
    found.push([kind, line.slice(at, end + close.length)]);
    return end + close.length;
  }

  /** @param {string} word @param {string} after */
  #kindOf(word, after) {
    const { keywords, constants, anyCase } = /** @type {import("./languages.mjs").Language} */ (this.language);
    const known = anyCase ? word.toLowerCase() : word;
    if (keywords?.has(known)) return "keyword";
    if (constants?.has(known)) return "constant";
    return after === "(" ? "function" : "";
  }
}

/** @param {import("./languages.mjs").Language} language */
function patternOf(language) {
  let pattern = PATTERNS.get(language);
  if (pattern) return pattern;
  const parts = (language.more ?? []).map(([kind, source], index) => `(?<${kind}${index}>${source})`);
  (language.spans ?? []).forEach(([open], index) => parts.push(`(?<span${index}>${escaped(open)})`));
  if (language.comments) parts.push(`(?<comment>(?:${language.comments.map(escaped).join("|")}).*)`);
  for (const [index, quote] of [...(language.quotes ?? "")].entries()) {
    parts.push(`(?<string${index}9>${quote}(?:[^${quote}\\\\]|\\\\.)*${quote}?)`);
  }
  parts.push(`(?<number>${NUMBER})`, `(?<word>${WORD})`);
  pattern = new RegExp(parts.join("|"), "g");
  PATTERNS.set(language, pattern);
  return pattern;
}

/** @param {string} text */
function escaped(text) {
  return text.replaceAll(/[$()*+./?[\\\]^{|}]/g, "\\$&");
}
