// Asks for the API key when the server wants one.

import { setKey } from "./api.mjs";

export class KeyDialog {
  #given = false;
  /** @type {Promise<boolean> | null} */
  #open = null;
  #asked = 0;

  /** @param {HTMLDialogElement} dialog */
  constructor(dialog) {
    this.dialog = dialog;
    this.field = /** @type {HTMLInputElement} */ (dialog.querySelector("#key-value"));
    this.why = /** @type {HTMLElement} */ (dialog.querySelector("#key-why"));
    dialog.querySelector("#key-form")?.addEventListener("submit", (event) => {
      event.preventDefault();
      setKey(this.field.value.trim());
      this.#given = true;
      dialog.close();
    });
    dialog.querySelector("#key-cancel")?.addEventListener("click", () => dialog.close());
  }

  /** Ask, and say whether a key was given; who asks meanwhile waits for the same one. */
  ask() {
    this.#open ??= this.#ask();
    return this.#open;
  }

  async #ask() {
    if (this.#asked) this.why.textContent = "The server did not take that key.";
    this.#asked += 1;
    this.#given = false;
    this.field.value = "";
    this.dialog.showModal();
    await new Promise((resolve) => this.dialog.addEventListener("close", resolve, { once: true }));
    this.#open = null;
    return this.#given;
  }
}
