// The list of conversations: open, name, search, delete and bring back, export and import.

import { element } from "../element.mjs";
import { download } from "./download.mjs";
import { StorageFull } from "./library.mjs";
import { fileName, fromJson, toJson, toMarkdown } from "./transfer.mjs";

const WIDE = "(min-width: 72rem)"; // beside the conversation, not over it

/**
 * @typedef {object} Owner
 * @property {() => import("./chat.mjs").Chat} current
 * @property {(chat: import("./chat.mjs").Chat) => void} open
 * @property {() => void} openNew
 * @property {() => void} save keeps the current one
 */

export class Sidebar {
  /** @type {(() => void) | null} */
  #undo = null;
  #menuFor = "";
  #wide = matchMedia(WIDE);

  /**
   * @param {HTMLDialogElement} dialog
   * @param {HTMLElement} opener
   * @param {import("./library.mjs").Library} library
   * @param {Owner} owner
   * @param {import("../settings.mjs").Settings} settings
   * @param {() => void} onArranged when it was opened or closed for good
   */
  constructor(dialog, opener, library, owner, settings, onArranged) {
    this.dialog = dialog;
    this.opener = opener;
    this.library = library;
    this.owner = owner;
    this.settings = settings;
    this.onArranged = onArranged;
    const find = (/** @type {string} */ selector) => /** @type {any} */ (dialog.querySelector(selector));
    this.list = /** @type {HTMLElement} */ (find("#chat-list"));
    this.query = /** @type {HTMLInputElement} */ (find("#chat-search"));
    this.menu = /** @type {HTMLElement} */ (find("#chat-menu"));
    this.message = /** @type {HTMLElement} */ (find("#chat-message"));
    this.file = /** @type {HTMLInputElement} */ (find("#import-file"));
    this.query.addEventListener("input", () => this.show());
    this.list.addEventListener("click", (event) => this.#clicked(event));
    this.menu.addEventListener("click", (event) => this.#chosen(event));
    find("#export-all").addEventListener("click", () => this.#exportAll());
    find("#import").addEventListener("click", () => this.file.click());
    this.file.addEventListener("change", () => void this.#import());
    find("#close-chats").addEventListener("click", () => this.toggle(false));
    opener.addEventListener("click", () => this.toggle(!dialog.open));
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog && dialog.matches(":modal")) this.toggle(false); // beside it
    });
    dialog.addEventListener("close", () => this.#opened());
    this.#wide.addEventListener("change", () => this.#arrange());
    window.addEventListener("storage", () => this.show()); // another tab wrote
    this.#arrange();
  }

  /** Open or close the list. @param {boolean} open */
  toggle(open) {
    if (this.#wide.matches) {
      this.settings.chatsOpen = open;
      this.onArranged();
    }
    if (!open) this.dialog.close();
    else if (this.#wide.matches) this.dialog.show();
    else this.dialog.showModal();
    if (open && this.#wide.matches) this.query.focus();
    this.#opened();
    if (open) this.show();
  }

  /** Draw the list as it is now. */
  show() {
    if (!this.dialog.open) return;
    const query = this.query.value.trim();
    const found = this.library.search(query);
    const focused = this.list.contains(document.activeElement) ? document.activeElement?.id : "";
    this.list.replaceChildren(...found.map((entry) => this.#row(entry)));
    if (!found.length) {
      const text = query ? `Nothing has “${query}” in it.` : "Conversations are kept here, in this browser only.";
      this.list.append(element("li", { class: "hint none", text }));
    }
    if (focused) document.getElementById(focused)?.focus();
  }

  #opened() {
    this.opener.setAttribute("aria-expanded", String(this.dialog.open));
  }

  /** Wide or narrow, it is where it belongs, without taking the focus. */
  #arrange() {
    if (this.dialog.open) this.dialog.close();
    if (this.#wide.matches && this.settings.chatsOpen) this.dialog.setAttribute("open", "");
    this.#opened();
    this.show();
  }

  /** @param {import("./library.mjs").Entry & {snippet: string}} entry */
  #row({ id, title, changedAt, snippet }) {
    const isCurrent = this.owner.current().id === id;
    const name = title || "Untitled";
    return element("li", { "data-id": id }, [
      element("button", { type: "button", id: `open-${id}`, class: "chat-open", "data-do": "open", "aria-current": isCurrent ? "true" : null }, [
        element("span", { class: "chat-title", text: name }),
        element("span", { class: "hint", text: snippet || dateOf(changedAt) }),
      ]),
      element("button", { type: "button", id: `more-${id}`, class: "quiet chat-more", "data-do": "more", "aria-haspopup": "true", "aria-label": `Rename, export or delete “${name}”`, text: "⋯" }),
    ]);
  }

  /** @param {Event} event */
  #clicked(event) {
    const button = /** @type {Element} */ (event.target).closest("button");
    const id = button?.closest("li")?.dataset.id;
    if (!button || !id) return;
    if (button.dataset.do === "more") this.#showMenu(button, id);
    else this.#open(id);
  }

  /** @param {string} id */
  #open(id) {
    const chat = this.library.open(id);
    if (!chat) return this.#tell("This conversation cannot be read any more.");
    if (this.dialog.matches(":modal")) this.toggle(false);
    this.owner.open(chat);
    this.show();
  }

  /** @param {HTMLElement} button @param {string} id */
  #showMenu(button, id) {
    this.#menuFor = id;
    this.menu.showPopover();
    const at = button.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.menu;
    this.menu.style.left = `${Math.max(8, Math.min(at.right - width, innerWidth - width - 8))}px`;
    this.menu.style.top = `${at.bottom + height < innerHeight ? at.bottom : Math.max(8, at.top - height)}px`;
    /** @type {HTMLElement} */ (this.menu.firstElementChild).focus();
  }

  /** @param {Event} event */
  #chosen(event) {
    const action = /** @type {Element} */ (event.target).closest("button")?.dataset.do;
    if (!action) return;
    this.menu.hidePopover();
    const id = this.#menuFor;
    if (action === "delete") return this.#delete(id);
    if (action === "rename") return this.#rename(id);
    const chat = this.#chat(id);
    if (!chat) return;
    if (action === "markdown") download(fileName(chat.title, "md"), toMarkdown(chat), "text/markdown");
    else download(fileName(chat.title, "json"), toJson([chat]), "application/json");
  }

  /** The one that is open is newer than what is kept of it. @param {string} id */
  #chat(id) {
    const current = this.owner.current();
    return current.id === id ? current : this.library.open(id);
  }

  /** @param {string} id */
  #rename(id) {
    const row = /** @type {HTMLElement | null} */ (this.list.querySelector(`[data-id="${id}"]`));
    const chat = this.#chat(id);
    if (!row || !chat) return;
    const field = /** @type {HTMLInputElement} */ (element("input", { type: "text", "aria-label": "Title of the conversation", maxlength: 200 }));
    field.value = chat.title;
    let isDone = false; // taking the field away blurs it, too
    const done = (/** @type {boolean} */ keep) => {
      if (isDone) return;
      isDone = true;
      if (keep) {
        chat.ownTitle = field.value.trim();
        this.#try(() => this.library.save(chat));
      }
      this.show();
      document.getElementById(`open-${id}`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      done(event.key === "Enter");
    });
    field.addEventListener("blur", () => done(true));
    row.replaceChildren(field);
    field.select();
  }

  /** @param {string} id */
  #delete(id) {
    const title = this.#chat(id)?.title ?? "";
    const isCurrent = this.owner.current().id === id;
    if (isCurrent) {
      this.owner.save();
      this.owner.openNew();
    }
    this.#undo = this.library.remove(id);
    this.show();
    const button = element("button", { type: "button", class: "quiet", text: "Undo" });
    button.addEventListener("click", () => this.#bringBack(isCurrent ? id : ""));
    this.#tell(`Deleted “${title.length > 40 ? `${title.slice(0, 40)}…` : title}”.`, button);
    button.focus();
  }

  /** @param {string} toOpen */
  #bringBack(toOpen) {
    const undo = this.#undo;
    this.#undo = null;
    if (!undo || !this.#try(undo)) return;
    this.#tell("It is back.");
    const chat = toOpen && this.library.open(toOpen);
    if (chat) this.owner.open(chat);
    this.show();
    this.query.focus();
  }

  #exportAll() {
    this.owner.save();
    const chats = this.library.entries.flatMap(({ id }) => this.#chat(id) ?? []);
    download(`slipstream-${new Date().toISOString().slice(0, 10)}.json`, toJson(chats), "application/json");
    this.#tell(chats.length === 1 ? "Exported 1 conversation." : `Exported ${chats.length} conversations.`);
  }

  async #import() {
    const [file] = this.file.files ?? [];
    this.file.value = "";
    if (!file) return;
    try {
      const chats = fromJson(await file.text());
      this.library.add(chats);
      this.#tell(chats.length === 1 ? "Imported 1 conversation." : `Imported ${chats.length} conversations.`);
    } catch (error) {
      const why = error instanceof Error ? error.message : String(error);
      this.#tell(error instanceof StorageFull ? why : `${file.name} was not imported: ${why}`);
    }
    this.show();
  }

  /** @param {() => void} action @returns {boolean} */
  #try(action) {
    try {
      action();
      return true;
    } catch (error) {
      this.#tell(error instanceof Error ? error.message : String(error));
      return false;
    }
  }

  /** @param {string} text @param {HTMLElement[]} more */
  #tell(text, ...more) {
    this.message.hidden = !text;
    this.message.replaceChildren(element("span", { text }), ...more);
  }
}

/** @param {number} at milliseconds */
function dateOf(at) {
  const date = new Date(at);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday
    ? date.toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hour12: false })
    : date.toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}
