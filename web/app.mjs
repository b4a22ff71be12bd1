// Puts the page together: elements, settings, conversations, and what keys and buttons do.

import { Announcer } from "./announcer.mjs";
import { ApiProblem, fetchModels } from "./api.mjs";
import { Chat } from "./chats/chat.mjs";
import { Library } from "./chats/library.mjs";
import { Sidebar } from "./chats/sidebar.mjs";
import { copyText } from "./clipboard.mjs";
import { Composer } from "./composer.mjs";
import { Conversation } from "./conversation.mjs";
import { element } from "./element.mjs";
import { KeyDialog } from "./key_dialog.mjs";
import { LogView } from "./log_view.mjs";
import { Settings } from "./settings.mjs";
import { SettingsView } from "./settings_view.mjs";
import { openStorage } from "./storage.mjs";
import { TokenTip } from "./token_tip.mjs";

const IDEAS = ["What is the capital of France?", "What is 17 plus 25?", "Tell me a story."];
const THEME_SIGNS = { auto: "◐", light: "○", dark: "●" };
const THEME_LABELS = { auto: "as the system", light: "light", dark: "dark" };

/** @param {string} id @returns {any} */
const byId = (id) => document.getElementById(id);

const storage = openStorage();
const settings = new Settings();
settings.load(storage);
const library = new Library(storage);

const models = /** @type {HTMLSelectElement} */ (byId("model"));
/** @type {import("./api.mjs").ModelCard[]} */
let cards = [];
const keyDialog = new KeyDialog(byId("key"));
const announcer = new Announcer(byId("announcer"));
const log = new LogView(byId("log"), byId("scroller"), byId("to-end"), settings);
const tip = new TokenTip(log.log, byId("tip"), (span) => {
  return log.answerOf(span)?.pieces[Number(span.dataset.index)] ?? null;
});

const conversation = new Conversation(library.openLast(), settings, {
  onBegin: (answer) => {
    log.renew(answer);
    log.show(conversation.chat);
    announcer.begin(answer);
    showState();
    sidebar.show();
  },
  onChange: (answer) => {
    log.changed(answer);
    announcer.more(answer);
  },
  onEnd: (answer) => {
    if (conversation.chat.lastAnswer === answer) announcer.end(answer); // else another one was opened
    showState();
    sidebar.show();
  },
  onKeyWanted: () => keyDialog.ask(),
  onKept: (message) => showNotice("kept", message),
}, library);

const composer = new Composer(byId("ask"), send, showState);
const sidebar = new Sidebar(byId("chats"), byId("open-chats"), library, {
  current: () => conversation.chat,
  open,
  openNew: () => open(new Chat()),
  save: () => conversation.save(),
}, settings, () => settings.save(storage));
const settingsView = new SettingsView(byId("settings"), byId("open-settings"), settings, () => {
  settings.save(storage);
  showState();
});

function showState() {
  const running = conversation.isRunning;
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  byId("empty").hidden = !conversation.chat.isEmpty;
  byId("active-settings").textContent = settings.summary();
  for (const question of log.log.querySelectorAll(".question")) {
    const isEdited = Number(question.getAttribute("data-turn")) === composer.editing;
    question.toggleAttribute("data-edited", isEdited);
  }
}

function send() {
  if (conversation.isRunning || composer.isEmpty) return;
  const { question, files, editing } = composer;
  conversation.chat.ask(question.value, files, editing);
  library.setCurrent(conversation.chat);
  composer.clear();
  run();
}

/** @param {boolean} [continuing] */
function run(continuing = false) {
  log.show(conversation.chat);
  log.follow();
  void conversation.run(continuing);
  showState();
}

function regenerate() {
  if (conversation.isRunning || !conversation.chat.askAgain()) return;
  run();
  composer.question.focus();
}

function goOn() {
  if (conversation.isRunning || !conversation.chat.lastAnswer?.canContinue) return;
  run(true);
  composer.question.focus();
}

/** @param {Element} button */
function edit(button) {
  const index = Number(button.closest("[data-turn]")?.getAttribute("data-turn"));
  const turn = conversation.chat.turns[index];
  if (!conversation.isRunning && turn?.role === "user") composer.edit(index, turn);
}

/** Show another version of a question or an answer. @param {Element} button */
function showVersion(button) {
  if (conversation.isRunning) return;
  const to = Number(button.getAttribute("data-to"));
  const name = button.getAttribute("aria-label");
  const place = [...log.log.children].findIndex((node) => node.contains(button));
  if (composer.editing >= 0) composer.clear();
  conversation.chat.show(to);
  conversation.save();
  log.stay();
  log.show(conversation.chat);
  showState();
  const shown = log.log.children[place];
  const arrows = /** @type {HTMLElement[]} */ ([...shown.querySelectorAll(".arrow:not([disabled])")]);
  (arrows.find((arrow) => arrow.getAttribute("aria-label") === name) ?? arrows[0])?.focus();
  shown.scrollIntoView({ block: "nearest" });
}

/** @param {Chat} chat */
function open(chat) {
  conversation.open(chat);
  library.setCurrent(chat);
  composer.clear();
  log.show(chat);
  showState();
  sidebar.show();
  log.follow();
}

async function loadModels() {
  showNotice("models", "");
  try {
    cards = await fetchModels();
    models.replaceChildren(...cards.map((card) => element("option", { value: card.id, text: card.id })));
    if (!cards.length) throw new ApiProblem(503, { title: "No model is served yet", message: "Its processes may still be starting." });
    if (!cards.some((card) => card.id === settings.model)) settings.model = cards[0].id;
    models.value = settings.model;
    models.disabled = false;
    showDefaults();
  } catch (error) {
    if (error instanceof ApiProblem && error.status === 401) {
      if (await keyDialog.ask()) return loadModels();
    }
    const problem = error instanceof ApiProblem ? error.problem : { title: "The page failed", message: String(error) };
    models.disabled = true;
    showNotice("models", `${problem.title}: ${problem.message}`, () => void loadModels());
  }
}

function showDefaults() {
  settingsView.showDefaults(cards.find((card) => card.id === settings.model));
}

/** @param {"models" | "kept"} kind each has a place of its own @param {string} text @param {(() => void)} [retry] */
function showNotice(kind, text, retry) {
  const notice = byId(`notice-${kind}`);
  if (notice.firstElementChild?.textContent === text) return;
  notice.replaceChildren(...(text ? [element("span", { text })] : []));
  notice.hidden = !text;
  if (!retry) return;
  const button = element("button", { type: "button", text: "Try again" });
  button.addEventListener("click", retry);
  notice.append(button);
}

function showTheme() {
  const button = byId("theme");
  button.textContent = THEME_SIGNS[settings.theme];
  button.setAttribute("aria-label", `Theme: ${THEME_LABELS[settings.theme]}`);
  button.title = `Theme: ${THEME_LABELS[settings.theme]}`;
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
}

/** @param {Event} event */
function act(event) {
  const target = /** @type {Element} */ (event.target);
  const button = target.closest("[data-action]");
  switch (button?.getAttribute("data-action")) {
    case "regenerate":
      return regenerate();
    case "continue":
      return goOn();
    case "edit":
      return edit(button);
    case "version":
      return showVersion(button);
    case "copy":
      return void copy(button, log.answerOf(button)?.content ?? "");
    case "copy-code":
      return void copy(button, button.closest(".code")?.querySelector("code")?.textContent ?? "");
  }
}

/** @param {Element} button @param {string} text */
async function copy(button, text) {
  const done = await copyText(text);
  button.textContent = done ? "Copied" : "Not allowed";
  announcer.say(done ? "Copied." : "Copying is not allowed here.");
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** @param {KeyboardEvent} event */
function escape(event) {
  if (event.key !== "Escape" || document.querySelector("dialog:modal, :popover-open")) return;
  if (tip.isShown) tip.hide();
  else if (conversation.isRunning) conversation.stop();
  else if (composer.editing >= 0) composer.clear();
}

function listen() {
  document.addEventListener("keydown", escape);
  log.log.addEventListener("click", act);
  log.log.addEventListener("click", (event) => {
    if (/** @type {Element} */ (event.target).closest("summary")) log.stay();
  });
  log.log.addEventListener("toggle", (event) => {
    const details = /** @type {HTMLDetailsElement} */ (event.target);
    if (!details.classList.contains("stages")) return;
    settings.stagesOpen = details.open;
    settings.save(storage);
  }, { capture: true });
  byId("stop").addEventListener("click", () => {
    conversation.stop();
    composer.question.focus();
  });
  byId("to-end").addEventListener("click", () => log.follow());
  byId("scroller").addEventListener("scroll", () => tip.hide(), { passive: true });
  byId("new-chat").addEventListener("click", () => open(new Chat()));
  byId("theme").addEventListener("click", () => {
    settings.nextTheme();
    settings.save(storage);
    showTheme();
  });
  models.addEventListener("change", () => {
    settings.model = models.value;
    settings.save(storage);
    showDefaults();
  });
  window.addEventListener("pagehide", () => conversation.leave());
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) conversation.enter();
  });
}

showTheme();
byId("ideas").append(...IDEAS.map((text) => {
  const button = element("button", { type: "button", text });
  button.addEventListener("click", () => {
    composer.question.value = text;
    send();
  });
  return button;
}));
log.show(conversation.chat);
listen();
showState();
log.follow();
if (!matchMedia("(pointer: coarse)").matches) composer.question.focus(); // phones would open their keyboard
void loadModels();
