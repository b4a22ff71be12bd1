// What the user chose: kept in the browser, shown in a form, put into requests.

import { TOOLS } from "./tools.mjs";

const STORED = "slipstream.settings";
const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed",
  "frequency_penalty", "presence_penalty", "repetition_penalty",
];
const TEXTS = ["system", "stop", "top_logprobs", "reasoning", ...NUMBERS];
const SWITCHES = ["logprobs", ...Object.keys(TOOLS)];
// Any effort but "none" also sets the switch that most templates have instead of efforts.
const EFFORTS = new Map([["off", "none"], ["on", "medium"]]);
const THEMES = ["auto", "light", "dark"];
const DEFAULT_TOP_LOGPROBS = 5;
const MAX_CHARACTERS = 100_000;

/** @typedef {"auto" | "light" | "dark"} Theme */

export class Settings {
  constructor() {
    /** @type {Record<string, string | boolean>} As the form has them: texts and switches. */
    this.values = {};
    /** @type {Theme} */
    this.theme = "auto";
    this.model = "";
    this.stagesOpen = false;
    this.chatsOpen = true; // where there is room beside the conversation
  }

  /** @param {Storage} storage */
  load(storage) {
    try {
      const kept = JSON.parse(storage.getItem(STORED) ?? "{}");
      for (const name of TEXTS) if (typeof kept.values?.[name] === "string") this.values[name] = kept.values[name];
      for (const name of SWITCHES) this.values[name] = kept.values?.[name] === true;
      if (THEMES.includes(kept.theme)) this.theme = kept.theme;
      if (typeof kept.model === "string") this.model = kept.model;
      this.stagesOpen = kept.stagesOpen === true;
      this.chatsOpen = kept.chatsOpen !== false;
    } catch {
      // Nothing kept, or something else: the defaults hold.
    }
  }

  /** @param {Storage} storage */
  save(storage) {
    try {
      const { values, theme, model, stagesOpen, chatsOpen } = this;
      storage.setItem(STORED, JSON.stringify({ values, theme, model, stagesOpen, chatsOpen }));
    } catch {
      // Storage is full or off: the settings live as long as the page.
    }
  }

  nextTheme() {
    this.theme = /** @type {Theme} */ (THEMES[(THEMES.indexOf(this.theme) + 1) % THEMES.length]);
  }

  reset() {
    this.values = {};
  }

  get system() {
    return this.#text("system");
  }

  /** Put what is set into a request; what is empty is left to the model. */
  fields() {
    /** @type {Record<string, unknown>} */
    const fields = {};
    for (const name of NUMBERS) {
      const value = this.#number(name);
      if (value !== null) fields[name] = value;
    }
    const stops = String(this.values.stop ?? "").split("\n").filter((line) => line !== "");
    if (stops.length) fields.stop = stops;
    const effort = EFFORTS.get(this.#text("reasoning"));
    if (effort) fields.reasoning_effort = effort;
    if (this.values.logprobs) {
      fields.logprobs = true;
      fields.top_logprobs = this.#number("top_logprobs") ?? DEFAULT_TOP_LOGPROBS;
    }
    const tools = Object.entries(TOOLS).filter(([name]) => this.values[name]);
    if (tools.length) fields.tools = tools.map(([, tool]) => tool.definition);
    return fields;
  }

  /**
   * What holds where nothing is set, by the field's name: the model's own value or the server's.
   * @param {import("./api.mjs").ModelCard | undefined} card
   * @returns {Record<string, string>}
   */
  static inForce(card) {
    const found = Object.entries(card?.sampling_defaults ?? {}).map(([name, value]) => [name, String(value)]);
    const most = card?.max_model_len ? `up to ${card.max_model_len.toLocaleString("en")}` : "what fits";
    return { max_tokens: most, seed: "random", ...Object.fromEntries(found) };
  }

  /** Say in a few words what differs from the defaults. */
  summary() {
    const set = NUMBERS.filter((name) => this.#number(name) !== null);
    const words = set.map((name) => `${name} ${this.values[name]}`);
    if (this.system) words.unshift("system prompt");
    if (this.values.stop) words.push("stop");
    if (EFFORTS.has(this.#text("reasoning"))) words.push(`reasoning ${this.#text("reasoning")}`);
    for (const name of SWITCHES) if (this.values[name]) words.push(name);
    return words.length ? `Set: ${words.join(", ")}.` : "";
  }

  /** @param {HTMLFormElement} form */
  toForm(form) {
    for (const name of TEXTS) control(form, name).value = String(this.values[name] ?? "");
    for (const name of SWITCHES) control(form, name).checked = this.values[name] === true;
  }

  /** @param {HTMLFormElement} form */
  fromForm(form) {
    for (const name of TEXTS) this.values[name] = control(form, name).value.slice(0, MAX_CHARACTERS);
    for (const name of SWITCHES) this.values[name] = control(form, name).checked;
  }

  /** @param {string} name */
  #text(name) {
    return String(this.values[name] ?? "").trim();
  }

  /** @param {string} name */
  #number(name) {
    const text = this.#text(name);
    const value = Number(text);
    return text === "" || !Number.isFinite(value) ? null : value;
  }
}

/** @param {HTMLFormElement} form @param {string} name @returns {HTMLInputElement} */
function control(form, name) {
  return /** @type {HTMLInputElement} */ (form.elements.namedItem(name));
}
