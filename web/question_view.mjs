// One question on the page: its text, its files, and the ways to its other versions.

import { chipText } from "./composer.mjs";
import { element } from "./element.mjs";
import { MarkdownView } from "./markdown/view.mjs";

/**
 * @param {{content: string, files: import("./attachments.mjs").AttachedFile[]}} question
 * @param {number} index its place in the conversation
 * @param {number[]} versions the places of all its versions
 */
export function questionView({ content, files }, index, versions) {
  const bubble = element("div", { class: "bubble text" });
  new MarkdownView(bubble).update(content, false);
  const chips = files.map((file) =>
    element("details", { class: "file" }, [
      element("summary", { class: "chip" }, chipText(file)),
      element("pre", { tabindex: 0, "aria-label": file.name }, [element("code", { text: file.text })]),
    ]),
  );
  return element("article", { class: "question", "aria-label": "Question", "data-turn": index }, [
    ...chips,
    ...(content ? [bubble] : []),
    element("div", { class: "actions" }, [
      ...switcher(index, versions, "question"),
      element("button", { type: "button", class: "quiet", "data-action": "edit", text: "Edit" }),
    ]),
  ]);
}

/**
 * The arrows to the versions beside one, none where there is only one.
 * @param {number} index @param {number[]} versions @param {string} what
 */
export function switcher(index, versions, what) {
  if (versions.length < 2) return [];
  const place = versions.indexOf(index);
  const arrow = (/** @type {string} */ text, /** @type {string} */ name, /** @type {number} */ to) =>
    element("button", {
      type: "button", class: "quiet arrow", "data-action": "version", "data-to": versions[to] ?? "",
      "aria-label": `${name} version of this ${what}`, disabled: versions[to] === undefined, text,
    });
  return [
    element("span", { class: "versions", role: "group", "aria-label": `Versions of this ${what}` }, [
      arrow("‹", "Previous", place - 1),
      element("span", { class: "hint", text: `${place + 1} of ${versions.length}` }),
      arrow("›", "Next", place + 1),
    ]),
  ];
}
