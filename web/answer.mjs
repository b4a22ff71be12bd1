// One answer as it grows: chunks of chat completions folded into text, reasoning, calls and numbers.
// No DOM in here, and no clock: whoever calls says what time it is.

/**
 * @typedef {{token: string, logprob: number, bytes: number[] | null}} Alternative
 * @typedef {Alternative & {top_logprobs?: Alternative[]}} Scored
 * @typedef {{text: string, tokens: Scored[]}} Piece
 * @typedef {{id: string, name: string, arguments: string, result?: string, failed?: boolean}} Call
 * @typedef {{prompt: number, cached: number | null, completion: number, reasoning: number | null}} Usage
 * @typedef {{headers: number | null, first: number | null, reasoned: number | null,
 *            last: number | null, end: number | null}} Times milliseconds since the request left;
 *          `reasoned` is when reasoning gave way to something else
 * @typedef {{message: string, title: string, param?: string | null, code?: string | null,
 *            retryAfterS?: number | null}} Problem
 */

const ENDS = /** @type {const} */ (["done", "stopped", "interrupted", "failed"]);
const MAX_CALLS = 128;

export class Answer {
  /** @param {string} model @param {number} sentAt milliseconds */
  constructor(model, sentAt) {
    this.model = model;
    this.content = "";
    this.reasoning = "";
    /** @type {Call[]} */
    this.calls = [];
    /** @type {Piece[]} Text with its tokens' probabilities, where they were asked for. */
    this.pieces = [];
    this.finish = "";
    /** @type {Usage | null} */
    this.usage = null;
    /** @type {Problem | null} */
    this.problem = null;
    /** @type {"streaming" | "done" | "stopped" | "interrupted" | "failed"} */
    this.state = "streaming";
    this.isContinued = false; // the numbers are those of its last part
    this.numDeltas = 0;
    this.sentAt = sentAt;
    /** @type {Times} */
    this.times = { headers: null, first: null, reasoned: null, last: null, end: null };
    /** @type {Scored[]} */
    this.waiting = []; // tokens whose text has not come yet
  }

  /**
   * Take one parsed event. Events that are no chunk are passed over.
   * @param {any} chunk
   * @param {number} now
   */
  take(chunk, now) {
    if (chunk === null || typeof chunk !== "object") return;
    if (chunk.error) {
      this.problem = problemOf(chunk, "The answer broke off");
      return;
    }
    if (typeof chunk.model === "string" && chunk.model) this.model = chunk.model;
    if (chunk.usage) this.usage = usageOf(chunk.usage);
    const choice = Array.isArray(chunk.choices) ? chunk.choices[0] : null;
    if (!choice) return;
    const delta = choice.delta ?? {};
    const scored = choice.logprobs?.content;
    const reasoning = string(delta.reasoning) || string(delta.reasoning_content);
    const content = string(delta.content) || string(delta.refusal);
    const calls = Array.isArray(delta.tool_calls) ? delta.tool_calls : [];
    if (Array.isArray(scored)) this.waiting.push(...scored);
    if (reasoning) this.reasoning += reasoning;
    for (const call of calls) this.#call(call);
    if (content) this.#content(content);
    if (calls.length) this.waiting = []; // they were not tokens of the answer's text
    // Nor are those of the reasoning; a chunk that ends it may bring the first of the text as well.
    else if (reasoning) this.waiting = splitByTokens(reasoning, this.waiting).rest;
    if (reasoning || content || calls.length) this.#arrived(now, Boolean(reasoning));
    if (choice.finish_reason) this.finish = String(choice.finish_reason);
  }

  /** @param {string} content */
  #content(content) {
    if (this.reasoning && !this.content) this.#dropMarks(content);
    this.content += content;
    if (this.waiting.length) {
      const before = this.content.length - content.length;
      if (before && !this.pieces.length) this.pieces.push({ text: this.content.slice(0, before), tokens: [] });
      const { pieces, rest } = splitByTokens(content, this.waiting);
      this.pieces.push(...pieces);
      this.waiting = rest;
    } else if (this.pieces.length) {
      this.pieces.push({ text: content, tokens: [] });
    }
  }

  /**
   * Tokens that ended the reasoning, and lines left empty after it, are none of the text.
   * @param {string} content
   */
  #dropMarks(content) {
    const first = this.waiting.findIndex((scored) => scored.token && content.startsWith(scored.token));
    if (first > 0) this.waiting.splice(0, first);
  }

  /** @param {any} delta */
  #call(delta) {
    const index = Number.isInteger(delta?.index) ? delta.index : this.calls.length;
    if (index < 0 || index >= MAX_CALLS) return;
    while (this.calls.length <= index) this.calls.push({ id: "", name: "", arguments: "" });
    const call = this.calls[index];
    if (delta.id) call.id = String(delta.id);
    if (delta.function?.name) call.name += String(delta.function.name);
    call.arguments += string(delta.function?.arguments);
  }

  /** @param {number} now @param {boolean} isReasoning */
  #arrived(now, isReasoning) {
    const sinceMs = now - this.sentAt;
    this.numDeltas += 1;
    this.times.first ??= sinceMs;
    if (!isReasoning && this.reasoning) this.times.reasoned ??= sinceMs;
    this.times.last = sinceMs;
  }

  /** Whether nothing of it came. */
  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  /** Whether the model can be asked to go on where it stopped. */
  get canContinue() {
    const isCut = ["stopped", "interrupted", "failed"].includes(this.state) || this.finish === "length";
    return isCut && this.content.trim() !== "" && !this.calls.length;
  }

  /**
   * Go on with what is there: the numbers are those of the rest. Spaces at the end go, as models
   * write them before a word, not behind it.
   * @param {number} now
   */
  resume(now) {
    this.content = this.content.trimEnd();
    this.pieces = this.pieces.length ? [{ text: this.content, tokens: [] }] : [];
    this.waiting = [];
    this.finish = "";
    this.problem = this.usage = null;
    this.state = "streaming";
    this.isContinued = true;
    this.numDeltas = 0;
    this.sentAt = now;
    this.times = { headers: null, first: null, reasoned: null, last: null, end: null };
  }

  /** What is kept over a reload: all but the tokens' probabilities, which are many. */
  toJSON() {
    const { model, content, reasoning, calls, finish, usage, problem, state, isContinued, numDeltas, times } = this;
    return { model, content, reasoning, calls, finish, usage, problem, state, isContinued, numDeltas, times };
  }

  /**
   * Make an answer of what was kept; one that was streaming then was cut off.
   * @param {any} kept
   */
  static from(kept) {
    const answer = new Answer(string(kept.model), NaN);
    answer.content = string(kept.content);
    answer.reasoning = string(kept.reasoning);
    answer.finish = string(kept.finish);
    answer.usage = kept.usage ? keptUsage(kept.usage) : null;
    answer.problem = kept.problem ? keptProblem(kept.problem) : null;
    answer.numDeltas = number(kept.numDeltas) ?? 0;
    answer.isContinued = kept.isContinued === true;
    answer.state = ENDS.find((state) => state === kept.state) ?? "interrupted"; // it was streaming then
    for (const call of Array.isArray(kept.calls) ? kept.calls.slice(0, MAX_CALLS) : []) {
      const [id, name, args] = [string(call?.id), string(call?.name), string(call?.arguments)];
      const result = typeof call?.result === "string" ? { result: call.result, failed: call.failed === true } : {};
      answer.calls.push({ id, name, arguments: args, ...result });
    }
    for (const name of /** @type {(keyof Times)[]} */ (Object.keys(answer.times))) answer.times[name] = number(kept.times?.[name]);
    return answer;
  }
}

/** @param {any} kept @returns {Usage} */
function keptUsage({ prompt, cached, completion, reasoning }) {
  return { prompt: number(prompt) ?? 0, cached: number(cached), completion: number(completion) ?? 0, reasoning: number(reasoning) };
}

/** @param {any} kept @returns {Problem} */
function keptProblem({ title, message, param, code }) {
  return { title: string(title), message: string(message), param: string(param) || null, code: string(code) || null };
}

/**
 * Cut a text at its tokens' ends. A token without text of its own (half a character, a special one)
 * goes to the piece after it; `rest` are tokens whose text has not come, or never will: that of the
 * end, or of a stop string.
 * @param {string} text
 * @param {Scored[]} tokens
 * @returns {{pieces: Piece[], rest: Scored[]}}
 */
export function splitByTokens(text, tokens) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  /** @type {Piece[]} */
  const pieces = [];
  /** @type {Scored[]} */
  let group = [];
  let at = 0;
  let next = 0;
  for (; next < tokens.length && at < text.length; next += 1) {
    const token = tokens[next];
    const found = Array.isArray(token.bytes)
      ? decoder.decode(Uint8Array.from(token.bytes), { stream: true })
      : string(token.token);
    group.push(token);
    if (!found || !text.startsWith(found, at)) continue;
    pieces.push({ text: found, tokens: group });
    at += found.length;
    group = [];
  }
  if (at < text.length) {
    pieces.push({ text: text.slice(at), tokens: group });
    group = [];
  }
  return { pieces, rest: [...group, ...tokens.slice(next)] };
}

/**
 * What a body or an event in OpenAI's error shape says.
 * @param {any} body
 * @param {string} title
 * @returns {Problem}
 */
export function problemOf(body, title) {
  const error = body?.error ?? {};
  const message = typeof error === "string" ? error : string(error.message);
  return {
    title,
    message: message || "The server did not say why.",
    param: string(error.param) || null,
    code: string(error.code) || null,
  };
}

/** @param {any} usage @returns {Usage} */
function usageOf(usage) {
  return {
    prompt: number(usage.prompt_tokens) ?? 0,
    cached: number(usage.prompt_tokens_details?.cached_tokens),
    completion: number(usage.completion_tokens) ?? 0,
    reasoning: number(usage.completion_tokens_details?.reasoning_tokens),
  };
}

/** @param {unknown} value */
function string(value) {
  return typeof value === "string" ? value : "";
}

/** @param {unknown} value */
function number(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
