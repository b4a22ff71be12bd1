// The browser's storage, or where it is switched off one that lives as long as the page.

/** @returns {Storage} */
export function openStorage() {
  try {
    const storage = window.localStorage;
    storage.getItem("slipstream");
    return storage;
  } catch {
    return new MemoryStorage();
  }
}

/** What the page uses of a Storage, without a browser. @implements {Storage} */
export class MemoryStorage {
  #kept = new Map();

  get length() {
    return this.#kept.size;
  }

  /** @param {number} index */
  key(index) {
    return [...this.#kept.keys()][index] ?? null;
  }

  /** @param {string} name @returns {string | null} */
  getItem(name) {
    return this.#kept.get(name) ?? null;
  }

  /** @param {string} name @param {string} text */
  setItem(name, text) {
    this.#kept.set(name, text);
  }

  /** @param {string} name */
  removeItem(name) {
    this.#kept.delete(name);
  }

  clear() {
    this.#kept.clear();
  }
}
