// The calculator tool: a recursive descent over + - * / % ^, brackets, and a few functions.
// Nothing is ever evaluated as a script.

const MAX_CHARACTERS = 1000;
const MAX_DEPTH = 100;
const TOKEN = /\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([a-zA-Zπ]+)|(\*\*|[-+*/%^(),×÷−]))/y;

/** @type {Map<string, (...values: number[]) => number>} */
const FUNCTIONS = new Map([
  ["sqrt", Math.sqrt],
  ["abs", Math.abs],
  ["round", Math.round],
  ["floor", Math.floor],
  ["ceil", Math.ceil],
  ["sin", Math.sin],
  ["cos", Math.cos],
  ["tan", Math.tan],
  ["ln", Math.log],
  ["log", Math.log10],
  ["exp", Math.exp],
  ["min", Math.min],
  ["max", Math.max],
]);
const CONSTANTS = new Map([["pi", Math.PI], ["π", Math.PI], ["e", Math.E]]);
const SAME = new Map([["×", "*"], ["÷", "/"], ["−", "-"], ["**", "^"]]);

/**
 * Compute an expression; throws an Error that says what is wrong with it.
 * @param {string} expression
 * @returns {number}
 */
export function calculate(expression) {
  if (expression.length > MAX_CHARACTERS) throw new Error("the expression is too long");
  const parser = new Parser(tokens(expression));
  const value = parser.sum(0);
  parser.end();
  if (!Number.isFinite(value)) throw new Error("the result is not a finite number");
  return value;
}

/**
 * Write a number as people do: without the last digits' noise of binary fractions.
 * @param {number} value
 */
export function formatNumber(value) {
  return String(Number.isInteger(value) ? value : Number(value.toPrecision(12)));
}

/**
 * @param {string} text
 * @returns {(string | number)[]}
 */
function tokens(text) {
  const found = [];
  const source = text.trim();
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < source.length) {
    const at = TOKEN.lastIndex;
    const match = TOKEN.exec(source);
    if (!match) throw new Error(`did not understand ${JSON.stringify(source.slice(at, at + 20))}`);
    if (match[1] !== undefined) found.push(Number(match[1]));
    else if (match[2] !== undefined) found.push(match[2].toLowerCase());
    else found.push(SAME.get(match[3]) ?? match[3]);
  }
  return found;
}

class Parser {
  #at = 0;
  #tokens;

  /** @param {(string | number)[]} found */
  constructor(found) {
    this.#tokens = found;
  }

  /** @param {number} depth */
  sum(depth) {
    let value = this.#product(depth);
    for (;;) {
      if (this.#take("+")) value += this.#product(depth);
      else if (this.#take("-")) value -= this.#product(depth);
      else return value;
    }
  }

  end() {
    if (this.#at < this.#tokens.length) {
      throw new Error(`did not expect ${JSON.stringify(String(this.#tokens[this.#at]))}`);
    }
  }

  /** @param {number} depth */
  #product(depth) {
    let value = this.#signed(depth);
    for (;;) {
      if (this.#take("*")) value *= this.#signed(depth);
      else if (this.#take("/")) value = divide(value, this.#signed(depth));
      else if (this.#take("%")) value = remainder(value, this.#signed(depth));
      else return value;
    }
  }

  /** @param {number} depth @returns {number} */
  #signed(depth) {
    if (depth > MAX_DEPTH) throw new Error("the expression is nested too deeply");
    if (this.#take("-")) return -this.#signed(depth + 1);
    if (this.#take("+")) return this.#signed(depth + 1);
    const base = this.#value(depth);
    return this.#take("^") ? base ** this.#signed(depth + 1) : base; // -2^2 is -4, 2^-1 is 0.5
  }

  /** @param {number} depth */
  #value(depth) {
    const token = this.#tokens[this.#at++];
    if (typeof token === "number") return token;
    if (token === "(") {
      const value = this.sum(depth + 1);
      this.#expect(")");
      return value;
    }
    const constant = CONSTANTS.get(token);
    if (constant !== undefined) return constant;
    const call = FUNCTIONS.get(token);
    if (!call) {
      throw new Error(token === undefined ? "the expression ends too early" : `there is no ${JSON.stringify(token)}`);
    }
    this.#expect("(");
    const values = [this.sum(depth + 1)];
    while (this.#take(",")) values.push(this.sum(depth + 1));
    this.#expect(")");
    return call(...values);
  }

  /** @param {string} token */
  #take(token) {
    if (this.#tokens[this.#at] !== token) return false;
    this.#at += 1;
    return true;
  }

  /** @param {string} token */
  #expect(token) {
    if (!this.#take(token)) throw new Error(`expected ${JSON.stringify(token)}`);
  }
}

/** @param {number} value @param {number} by */
function divide(value, by) {
  if (by === 0) throw new Error("division by zero");
  return value / by;
}

/** @param {number} value @param {number} by */
function remainder(value, by) {
  if (by === 0) throw new Error("division by zero");
  return value % by;
}
