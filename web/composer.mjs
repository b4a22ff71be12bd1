// The field for questions: its height, the files that go along, and which question is being edited.

import { formatBytes, MAX_FILES, readTextFile } from "./attachments.mjs";
import { element } from "./element.mjs";

export class Composer {
  /** @type {import("./attachments.mjs").AttachedFile[]} */
  files = [];
  /** The place of the question that is edited, -1 where a new one is written. */
  editing = -1;

  /**
   * @param {HTMLFormElement} form
   * @param {(composer: Composer) => void} onSend
   * @param {() => void} onEdit when editing begins or ends
   */
  constructor(form, onSend, onEdit) {
    const find = (/** @type {string} */ selector) => /** @type {any} */ (form.querySelector(selector));
    this.onEdit = onEdit;
    this.question = /** @type {HTMLTextAreaElement} */ (find("textarea"));
    this.chips = /** @type {HTMLElement} */ (find("#files"));
    this.trouble = /** @type {HTMLElement} */ (find("#file-trouble"));
    this.picker = /** @type {HTMLInputElement} */ (find("#file-picker"));
    this.banner = /** @type {HTMLElement} */ (find("#editing"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      onSend(this);
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      onSend(this);
    });
    this.question.addEventListener("input", () => this.fit());
    find("#attach").addEventListener("click", () => this.picker.click());
    find("#cancel-edit").addEventListener("click", () => this.clear());
    this.picker.addEventListener("change", () => {
      void this.attach([...(this.picker.files ?? [])]);
      this.picker.value = "";
    });
    this.#listenToDrops(form);
  }

  get isEmpty() {
    return !this.question.value.trim() && !this.files.length;
  }

  /** Take a question back into the field. @param {number} index @param {{content: string, files: import("./attachments.mjs").AttachedFile[]}} question */
  edit(index, { content, files }) {
    this.editing = index;
    this.question.value = content;
    this.files = [...files];
    this.#show();
    this.question.focus();
  }

  /** Begin a new question. */
  clear() {
    this.editing = -1;
    this.question.value = "";
    this.files = [];
    this.trouble.hidden = true;
    this.#show();
    this.question.focus();
  }

  /** Make the field as high as its text; CSS bounds it. */
  fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${this.question.scrollHeight + 2}px`;
  }

  /** @param {File[]} files */
  async attach(files) {
    const troubles = [];
    for (const file of files) {
      if (this.files.length >= MAX_FILES) {
        troubles.push(`a question can have ${MAX_FILES} files at most`);
        break;
      }
      try {
        this.files.push(await readTextFile(file));
      } catch (error) {
        troubles.push(error instanceof Error ? error.message : String(error));
      }
    }
    this.trouble.hidden = !troubles.length;
    this.trouble.textContent = troubles.length ? `Not attached: ${troubles.join("; ")}.` : "";
    this.#show();
    this.question.focus();
  }

  #show() {
    this.banner.hidden = this.editing < 0;
    this.chips.hidden = !this.files.length;
    this.chips.replaceChildren(...this.files.map((file, index) => {
      const button = element("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}`, text: "✕" });
      button.addEventListener("click", () => {
        this.files.splice(index, 1);
        this.#show();
        this.question.focus();
      });
      return element("li", { class: "chip" }, [...chipText(file), button]);
    }));
    this.fit();
    this.onEdit();
  }

  /** @param {HTMLFormElement} form */
  #listenToDrops(form) {
    const filesOf = (/** @type {DataTransfer | null} */ data) => [...(data?.files ?? [])];
    form.addEventListener("paste", (event) => {
      const files = filesOf(event.clipboardData);
      if (!files.length) return;
      event.preventDefault();
      void this.attach(files);
    });
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
    });
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault(); // the browser would open the file in the page's place
      void this.attach(filesOf(event.dataTransfer));
    });
  }
}

/** What a chip says of a file. @param {import("./attachments.mjs").AttachedFile} file */
export function chipText({ name, text }) {
  return [
    element("span", { class: "chip-name", text: name }),
    element("span", { class: "hint", text: formatBytes(new TextEncoder().encode(text).length) }),
  ];
}
