// All conversations, in the browser's storage: one entry each and a list of them. No DOM in here.

import { Chat, newId } from "./chat.mjs";

const LIST = "slipstream.chats";
const PREFIX = "slipstream.chat.";
const MAX_CHATS = 500;
const MAX_CHARACTERS = 4_500_000; // browsers give a site some five million
const SNIPPET_CHARACTERS = 70;

/** @typedef {{id: string, title: string, changedAt: number}} Entry */

/** The storage has no room left: the message says what to do. */
export class StorageFull extends Error {}

export class Library {
  /** @type {Map<string, {key: string, texts: string[]}>} What was searched before. */
  #searched = new Map();
  /** @type {Set<string>} Deleted ones: what still streams into them must not bring them back. */
  #removed = new Set();

  /** @param {Storage} storage */
  constructor(storage) {
    this.storage = storage;
  }

  /** @returns {Entry[]} the newest first */
  get entries() {
    return this.#list().entries.sort((one, other) => other.changedAt - one.changedAt);
  }

  /** The one that was open last; a new one where there is none. */
  openLast() {
    return this.open(this.#list().current) ?? new Chat();
  }

  /** @param {string} id @returns {Chat | null} */
  open(id) {
    try {
      const kept = this.storage.getItem(PREFIX + id);
      return kept === null ? null : Chat.from(JSON.parse(kept));
    } catch {
      return null;
    }
  }

  /** Remember which one is open. @param {Chat} chat */
  setCurrent(chat) {
    this.#put(LIST, JSON.stringify({ ...this.#list(), current: chat.id })); // without room it is forgotten
  }

  /** Keep a conversation as it is now; throws StorageFull. @param {Chat} chat */
  save(chat) {
    if (chat.isEmpty || this.#removed.has(chat.id)) return;
    const { entries, current } = this.#list();
    const others = entries.filter((entry) => entry.id !== chat.id);
    if (others.length >= MAX_CHATS) throw new StorageFull(`There is room for ${MAX_CHATS} conversations. Delete some to keep this one.`);
    const text = JSON.stringify(chat);
    const used = this.numCharacters - (this.storage.getItem(PREFIX + chat.id)?.length ?? 0);
    const advice = "Delete or export conversations: what is new is lost when the page is left.";
    if (used + text.length > MAX_CHARACTERS) throw new StorageFull(`The conversations fill their room in this browser. ${advice}`);
    const entry = { id: chat.id, title: chat.title, changedAt: chat.changedAt };
    if (!this.#put(PREFIX + chat.id, text)) throw new StorageFull(`The browser has no room for more. ${advice}`);
    this.#write({ entries: [...others, entry], current });
  }

  /**
   * Delete a conversation; what is returned brings it back.
   * @param {string} id
   */
  remove(id) {
    const { entries, current } = this.#list();
    const entry = entries.find((each) => each.id === id);
    const text = this.storage.getItem(PREFIX + id);
    this.storage.removeItem(PREFIX + id);
    this.#searched.delete(id);
    this.#removed.add(id);
    this.#write({ entries: entries.filter((each) => each.id !== id), current });
    return () => {
      if (!entry || text === null) return;
      if (!this.#put(PREFIX + id, text)) throw new StorageFull("The browser has no room for it any more.");
      this.#removed.delete(id);
      const list = this.#list();
      this.#write({ ...list, entries: [...list.entries.filter((each) => each.id !== id), entry] });
    };
  }

  /** Take in conversations from elsewhere, beside those that are here, as long as there is room. @param {Chat[]} chats */
  add(chats) {
    chats.forEach((chat, index) => {
      if (this.storage.getItem(PREFIX + chat.id) !== null || this.#removed.has(chat.id)) chat.id = newId();
      try {
        this.save(chat);
      } catch (error) {
        if (!(error instanceof StorageFull)) throw error;
        throw new StorageFull(`${index} of ${chats.length} conversations were imported. ${error.message}`);
      }
    });
  }

  /**
   * Find the conversations that have all words somewhere, with a piece of text around the first.
   * @param {string} query
   * @returns {(Entry & {snippet: string})[]}
   */
  search(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return this.entries.map((entry) => ({ ...entry, snippet: "" }));
    return this.entries.flatMap((entry) => {
      const texts = [entry.title, ...this.#texts(entry)];
      const lower = texts.map((text) => text.toLowerCase());
      if (!words.every((word) => lower.some((text) => text.includes(word)))) return [];
      const found = lower.findIndex((text, index) => index > 0 && text.includes(words[0]));
      return [{ ...entry, snippet: found < 0 ? "" : snippet(texts[found], lower[found].indexOf(words[0])) }];
    });
  }

  /** How much of the storage the conversations take. */
  get numCharacters() {
    return this.#list().entries.reduce((sum, { id }) => sum + (this.storage.getItem(PREFIX + id)?.length ?? 0), 0);
  }

  /** How full it is, from 0 to 1. */
  get fullness() {
    return this.numCharacters / MAX_CHARACTERS;
  }

  /** @param {Entry} entry */
  #texts({ id, changedAt, title }) {
    const key = `${changedAt} ${title} ${this.storage.getItem(PREFIX + id)?.length}`;
    let known = this.#searched.get(id);
    if (known?.key !== key) {
      known = { key, texts: this.open(id)?.texts() ?? [] };
      this.#searched.set(id, known);
    }
    return known.texts;
  }

  /** @returns {{entries: Entry[], current: string}} */
  #list() {
    try {
      const kept = JSON.parse(this.storage.getItem(LIST) ?? "{}");
      const entries = (Array.isArray(kept.entries) ? kept.entries : []).filter(
        (/** @type {any} */ entry) => typeof entry?.id === "string" && typeof entry.title === "string" && Number.isFinite(entry.changedAt),
      );
      return { entries, current: String(kept.current ?? "") };
    } catch {
      return { entries: [], current: "" };
    }
  }

  /** @param {{entries: Entry[], current: string}} list */
  #write(list) {
    if (!this.#put(LIST, JSON.stringify(list))) throw new StorageFull("The browser has no room for the list of conversations.");
  }

  /** @param {string} key @param {string} text */
  #put(key, text) {
    try {
      this.storage.setItem(key, text);
      return true;
    } catch {
      return false;
    }
  }
}

/** @param {string} text @param {number} at */
function snippet(text, at) {
  const from = Math.max(0, at - SNIPPET_CHARACTERS / 2);
  const piece = text.slice(from, from + SNIPPET_CHARACTERS).replaceAll(/\s+/g, " ").trim();
  return `${from ? "…" : ""}${piece}${from + SNIPPET_CHARACTERS < text.length ? "…" : ""}`;
}
