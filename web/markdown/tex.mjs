// TeX's formulas as a tree of plain objects. Whatever is not known stays there as its source, and
// what is half-written is read as far as it goes: nothing throws.

import {
  ACCENTS, DELIMITERS, FUNCTIONS, INTEGRALS, isAlphabet, LARGE_OPERATORS, LETTERS, LIMIT_FUNCTIONS, OPERATORS,
  SILENT, SPACES, styled, UNDER_ACCENTS,
} from "./tex_symbols.mjs";

/**
 * @typedef {{kind: "row", children: Tex[]}
 *         | {kind: "letter" | "number" | "operator" | "function" | "text" | "source", text: string}
 *         | {kind: "large", text: string, limits: boolean}
 *         | {kind: "limit", text: string}
 *         | {kind: "upright", text: string}
 *         | {kind: "delimiter", text: string}
 *         | {kind: "space", em: number}
 *         | {kind: "fraction", above: Tex, below: Tex, line: boolean}
 *         | {kind: "root", body: Tex, index: Tex | null}
 *         | {kind: "script", base: Tex, sub: Tex | null, sup: Tex | null}
 *         | {kind: "accent", base: Tex, mark: string, under: boolean}
 *         | {kind: "over", base: Tex, above: Tex | null, below: Tex | null}
 *         | {kind: "fenced", open: string, close: string, body: Tex}
 *         | {kind: "table", rows: Tex[][], look: "aligned" | "cases" | "matrix"}} Tex
 */

const MAX_DEPTH = 24;
const TOKEN = /\\(?:[A-Za-z]+\*?|[\s\S])|[0-9]+(?:[.,][0-9]+)*|\s+|%[^\n]*|[\s\S]/gu;
const BRACKETS = new Map(Object.entries({
  matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"],
  Vmatrix: ["‖", "‖"], smallmatrix: ["", ""], cases: ["{", ""], array: ["", ""],
}));
const ALIGNED = /^(?:align(?:ed|at)?|split|eqnarray|gather(?:ed)?|multline|equation)\*?$/;
const TEXTS = new Set(["text", "textrm", "textit", "textbf", "textsf", "texttt", "textnormal", "mbox", "hbox", "operatorname", "mathrm", "mathit"]);
const FRACTIONS = new Set(["frac", "dfrac", "tfrac", "cfrac"]);
const BINOMIALS = new Set(["binom", "dbinom", "tbinom"]);

/** Read a formula. @param {string} text @returns {Tex} */
export function readTex(text) {
  return new Reader(text).all();
}

class Reader {
  #at = 0;
  #depth = 0;

  /** @param {string} text */
  constructor(text) {
    this.tokens = (text.match(TOKEN) ?? []).filter((token) => token[0] !== "%");
  }

  /** @returns {Tex} */
  all() {
    /** @type {Tex[]} */
    const children = [];
    while (this.#at < this.tokens.length) {
      children.push(...this.#row(() => false));
      const left = this.#next(); // an end without its beginning
      if (left) children.push({ kind: "source", text: left });
    }
    return row(children);
  }

  get #token() {
    return this.tokens[this.#at] ?? "";
  }

  #next() {
    const token = this.#token;
    this.#at += 1;
    return token;
  }

  #skipSpace() {
    while (/^\s/.test(this.#token)) this.#at += 1;
  }

  /** Read until a token that ends a row, or the one that is waited for; it is left there. @param {(token: string) => boolean} isEnd */
  #row(isEnd) {
    /** @type {Tex[]} */
    const found = [];
    for (;;) {
      this.#skipSpace();
      const token = this.#token;
      if (!token || isEnd(token) || token === "}" || token === "\\right" || token === "\\end") return found;
      if (token === "&" || token === "\\\\") return found;
      if (token === "^" || token === "_" || token === "'") this.#script(found);
      else found.push(this.#atom());
    }
  }

  /** Put what is raised or lowered to what stands before it. @param {Tex[]} found */
  #script(found) {
    const base = found.pop() ?? row([]);
    const script = base.kind === "script" ? base : { kind: /** @type {const} */ ("script"), base, sub: null, sup: null };
    const mark = this.#next();
    if (mark === "'") {
      let primes = "′";
      while (this.#token === "'") primes += this.#next() && "′";
      script.sup = joined(script.sup, { kind: "operator", text: primes });
    } else {
      const value = this.#argument();
      if (mark === "^") script.sup = joined(script.sup, value);
      else script.sub = joined(script.sub, value);
    }
    found.push(script);
  }

  /** Read one argument: a group, or a single sign. @returns {Tex} */
  #argument() {
    this.#skipSpace();
    const token = this.#token;
    if (!token || token === "}" || token === "&" || token === "\\\\" || token === "\\end" || token === "\\right") return row([]);
    if (/^[0-9]{2,}/.test(token)) {
      this.tokens[this.#at] = token.slice(1); // `\frac12` is one half
      return { kind: "number", text: token[0] };
    }
    return this.#atom();
  }

  /** @returns {Tex} */
  #atom() {
    const token = this.#next();
    if (this.#depth >= MAX_DEPTH) return { kind: "source", text: token };
    this.#depth += 1;
    try {
      if (token === "{") return this.#group();
      if (token[0] === "\\" && token.length > 1) return this.#command(token.slice(1), token);
      return sign(token);
    } finally {
      this.#depth -= 1;
    }
  }

  /** @returns {Tex} */
  #group() {
    const children = this.#row((token) => token === "}");
    if (this.#token === "}") this.#at += 1;
    else if (this.#token === "&" || this.#token === "\\\\") return row([...children, sign(this.#next()), this.#group()]);
    return row(children);
  }

  /** @param {string} name @param {string} source @returns {Tex} */
  #command(name, source) {
    const large = LARGE_OPERATORS.get(name);
    if (large) return { kind: "large", text: large, limits: true };
    const integral = INTEGRALS.get(name);
    if (integral) return { kind: "large", text: integral, limits: false };
    if (FUNCTIONS.has(name)) return { kind: "function", text: name };
    if (LIMIT_FUNCTIONS.has(name)) return { kind: "limit", text: name.replace(/^(lim|arg)(...)$/, "$1 $2") };
    if (FRACTIONS.has(name)) return { kind: "fraction", above: this.#argument(), below: this.#argument(), line: true };
    if (BINOMIALS.has(name)) return this.#binomial();
    if (name === "sqrt") return { kind: "root", index: this.#option(), body: this.#argument() };
    if (TEXTS.has(name)) return this.#text(name);
    if (isAlphabet(name)) return restyled(this.#argument(), name);
    if (name === "left") return this.#fenced();
    if (name === "begin") return this.#environment();
    if (name === "boxed" || name === "mathop" || name === "mathbin" || name === "mathrel") return this.#argument();
    if (name === "pmod") return row([{ kind: "operator", text: "(" }, { kind: "function", text: "mod" }, this.#argument(), { kind: "operator", text: ")" }]);
    if (name === "bmod" || name === "mod") return { kind: "function", text: "mod" };
    if (name === "not") return negated(this.#argument());
    if (name === "tag") return row([{ kind: "space", em: 2 }, { kind: "text", text: `(${plain(this.#argument())})` }]);
    if (["stackrel", "overset", "underset"].includes(name)) return this.#stack(name);
    const accent = ACCENTS.get(name) ?? UNDER_ACCENTS.get(name);
    if (accent) return { kind: "accent", base: this.#argument(), mark: accent, under: UNDER_ACCENTS.has(name) };
    if (SILENT.has(name)) return row([]);
    return signOf(name) ?? { kind: "source", text: source };
  }

  /** @returns {Tex} */
  #binomial() {
    const body = /** @type {Tex} */ ({ kind: "fraction", above: this.#argument(), below: this.#argument(), line: false });
    return { kind: "fenced", open: "(", close: ")", body };
  }

  /** @param {string} name @returns {Tex} */
  #stack(name) {
    const mark = this.#argument();
    const base = this.#argument();
    return { kind: "over", base, above: name === "underset" ? null : mark, below: name === "underset" ? mark : null };
  }

  /** The argument in square brackets that some commands may have. @returns {Tex | null} */
  #option() {
    this.#skipSpace();
    if (this.#token !== "[") return null;
    this.#at += 1;
    const children = this.#row((token) => token === "]");
    if (this.#token === "]") this.#at += 1;
    return row(children);
  }

  /** Text in braces, as it is. @param {string} command @returns {Tex} */
  #text(command) {
    this.#skipSpace();
    if (this.#token !== "{") return { kind: "text", text: this.#next() };
    this.#at += 1;
    let [text, depth] = ["", 1];
    while (this.#at < this.tokens.length) {
      const token = this.#next();
      if (token === "{") depth += 1;
      else if (token === "}") depth -= 1;
      if (!depth) break;
      text += token.replace(/^\\([\s%#$&_{}])$/, "$1");
    }
    if (command === "operatorname") return { kind: "function", text };
    return command.startsWith("math") ? { kind: "upright", text } : { kind: "text", text };
  }

  #delimiter() {
    this.#skipSpace();
    const token = this.#next();
    if (token === ".") return "";
    return token[0] === "\\" ? (DELIMITERS.get(token.slice(1)) ?? token) : token;
  }

  /** @returns {Tex} */
  #fenced() {
    const open = this.#delimiter();
    /** @type {Tex[]} */
    const children = [];
    for (;;) {
      children.push(...this.#row(() => false));
      if (this.#token !== "&" && this.#token !== "\\\\") break;
      this.#at += 1;
    }
    if (this.#token !== "\\right") return { kind: "fenced", open, close: "", body: row(children) };
    this.#at += 1;
    return { kind: "fenced", open, close: this.#delimiter(), body: row(children) };
  }

  #name() {
    this.#skipSpace();
    if (this.#token !== "{") return "";
    this.#at += 1;
    let name = "";
    while (this.#token && this.#token !== "}") name += this.#next();
    this.#at += 1;
    return name;
  }

  /** @returns {Tex} */
  #environment() {
    const name = this.#name();
    if (name === "array" || name.startsWith("alignat")) this.#name(); // its columns
    /** @type {Tex[][]} */
    const rows = [[]];
    for (;;) {
      rows[rows.length - 1].push(row(this.#row(() => false)));
      if (this.#token === "&") this.#at += 1;
      else if (this.#token === "\\\\") {
        this.#at += 1;
        this.#option(); // the distance to the next row
        rows.push([]);
      } else break;
    }
    if (this.#token === "\\end") {
      this.#at += 1;
      this.#name();
    }
    const last = rows[rows.length - 1];
    if (rows.length > 1 && last.length === 1 && plain(last[0]) === "") rows.pop();
    const [open, close] = BRACKETS.get(name.replace(/\*$/, "")) ?? ["", ""];
    const body = /** @type {Tex} */ ({ kind: "table", rows, look: ALIGNED.test(name) ? "aligned" : name === "cases" ? "cases" : "matrix" });
    if (!ALIGNED.test(name) && !BRACKETS.has(name.replace(/\*$/, ""))) {
      return row([{ kind: "source", text: `\\begin{${name}}` }, body]);
    }
    return open || close ? { kind: "fenced", open, close, body } : body;
  }
}

/** @param {Tex[]} children @returns {Tex} */
function row(children) {
  return children.length === 1 ? children[0] : { kind: "row", children };
}

/** @param {Tex | null} before @param {Tex} more @returns {Tex} */
function joined(before, more) {
  if (!before) return more;
  return { kind: "row", children: before.kind === "row" ? [...before.children, more] : [before, more] };
}

/** @param {string} token @returns {Tex} */
function sign(token) {
  if (/^[0-9]/.test(token)) return { kind: "number", text: token };
  if (/^\p{L}/u.test(token)) return { kind: "letter", text: token };
  if (/^[([\])|]$/.test(token)) return { kind: "delimiter", text: token };
  if (token === "~") return { kind: "space", em: 0.25 };
  return { kind: "operator", text: token === "-" ? "−" : token === "*" ? "∗" : token };
}

/** @param {string} name @returns {Tex | null} */
function signOf(name) {
  const letter = LETTERS.get(name);
  if (letter) return { kind: "letter", text: letter };
  const delimiter = DELIMITERS.get(name);
  if (delimiter) return { kind: "delimiter", text: delimiter };
  const operator = OPERATORS.get(name);
  if (operator) return { kind: "operator", text: operator };
  const em = SPACES.get(name);
  return em === undefined ? null : { kind: "space", em };
}

/** @param {Tex} tex @param {string} command @returns {Tex} */
function restyled(tex, command) {
  if (tex.kind === "row") return { kind: "row", children: tex.children.map((child) => restyled(child, command)) };
  if (tex.kind !== "letter" && tex.kind !== "number") return tex;
  const text = styled(tex.text, command);
  return { kind: text === tex.text ? tex.kind : "upright", text };
}

/** @param {Tex} tex @returns {Tex} */
function negated(tex) {
  return "text" in tex ? { ...tex, text: `${tex.text}\u0338`.normalize("NFC") } : tex;
}

/** The signs of a tree in a row. @param {Tex} tex @returns {string} */
export function plain(tex) {
  if ("text" in tex) return tex.text;
  return tex.kind === "row" ? tex.children.map(plain).join("") : tex.kind === "space" ? "" : "…";
}
