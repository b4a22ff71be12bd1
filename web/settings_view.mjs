// The drawer of settings: its form, and in its empty fields the values that are in force.

import { Settings } from "./settings.mjs";

export class SettingsView {
  /**
   * @param {HTMLDialogElement} dialog
   * @param {HTMLElement} opener
   * @param {Settings} settings
   * @param {() => void} onChange
   */
  constructor(dialog, opener, settings, onChange) {
    this.form = /** @type {HTMLFormElement} */ (dialog.querySelector("form"));
    const { form } = this;
    opener.addEventListener("click", () => {
      settings.toForm(form);
      dialog.showModal();
    });
    dialog.querySelector("#close-settings")?.addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(); // beside it
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close();
    });
    form.addEventListener("input", () => {
      settings.fromForm(form);
      onChange();
    });
    dialog.querySelector("#reset-settings")?.addEventListener("click", () => {
      settings.reset();
      settings.toForm(form);
      onChange();
    });
  }

  /** Show what holds for a model where nothing is set. @param {import("./api.mjs").ModelCard | undefined} card */
  showDefaults(card) {
    const inForce = Settings.inForce(card);
    for (const field of this.form.querySelectorAll("input[data-default]")) {
      const name = /** @type {HTMLInputElement} */ (field).name;
      /** @type {HTMLInputElement} */ (field).placeholder = inForce[name] ?? "";
    }
  }
}
