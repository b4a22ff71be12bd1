// Puts the page together: elements, settings, the conversation, and what keys and buttons do.

import { Announcer } from "./announcer.mjs";
import { ApiProblem, fetchModels } from "./api.mjs";
import { Chat } from "./chat.mjs";
import { copyText } from "./clipboard.mjs";
import { Conversation } from "./conversation.mjs";
import { KeyDialog } from "./key_dialog.mjs";
import { LogView } from "./log_view.mjs";
import { element } from "./element.mjs";
import { Settings } from "./settings.mjs";
import { TokenTip } from "./token_tip.mjs";

const IDEAS = ["What is the capital of France?", "What is 17 plus 25?", "Tell me a story."];
const THEME_SIGNS = { auto: "◐", light: "○", dark: "●" };
const THEME_LABELS = { auto: "as the system", light: "light", dark: "dark" };

/** @param {string} id @returns {any} */
const byId = (id) => document.getElementById(id);

const storage = openStorage();
const settings = new Settings();
settings.load(storage);
const chat = new Chat();
chat.load(storage);

const question = /** @type {HTMLTextAreaElement} */ (byId("question"));
const models = /** @type {HTMLSelectElement} */ (byId("model"));
const form = /** @type {HTMLFormElement} */ (byId("settings-form"));
const keyDialog = new KeyDialog(byId("key"));
const announcer = new Announcer(byId("announcer"));
const log = new LogView(byId("log"), byId("scroller"), byId("to-end"), settings);
const tip = new TokenTip(log.log, byId("tip"), (span) => {
  return log.answerOf(span)?.pieces[Number(span.dataset.index)] ?? null;
});

const conversation = new Conversation(chat, settings, {
  onBegin: (answer) => {
    log.addAnswer(answer);
    announcer.begin();
    showState();
  },
  onChange: (answer) => {
    log.changed(answer);
    announcer.more(answer);
  },
  onEnd: (answer) => {
    announcer.end(answer);
    showState();
  },
  onKeyWanted: () => keyDialog.ask(),
}, storage);

function showState() {
  const running = conversation.isRunning;
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  byId("empty").hidden = chat.turns.length > 0;
  byId("active-settings").textContent = settings.summary();
}

/** @param {string} text */
function ask(text) {
  if (conversation.isRunning || !text.trim()) return;
  chat.ask(text);
  log.addQuestion(text);
  question.value = "";
  fit();
  run();
}

function run() {
  log.follow();
  void conversation.run();
  showState();
}

function regenerate() {
  if (conversation.isRunning || !chat.dropAnswers()) return;
  log.dropLast();
  run();
  question.focus();
}

function edit() {
  if (conversation.isRunning) return;
  const text = chat.takeQuestion();
  if (text === null) return;
  log.dropLast(true);
  conversation.save();
  question.value = text;
  fit();
  question.focus();
  showState();
}

function newChat() {
  conversation.stop();
  chat.clear();
  log.show(chat);
  conversation.save();
  showState();
  question.focus();
}

/** Make the field as high as its text; CSS bounds it. */
function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

async function loadModels() {
  showNotice("");
  try {
    const cards = await fetchModels();
    models.replaceChildren(...cards.map((card) => element("option", { value: card.id, text: card.id })));
    if (!cards.length) throw new ApiProblem(503, { title: "No model is served yet", message: "Its processes may still be starting." });
    if (!cards.some((card) => card.id === settings.model)) settings.model = cards[0].id;
    models.value = settings.model;
    models.disabled = false;
  } catch (error) {
    if (error instanceof ApiProblem && error.status === 401) {
      if (await keyDialog.ask()) return loadModels();
    }
    const problem = error instanceof ApiProblem ? error.problem : { title: "The page failed", message: String(error) };
    models.disabled = true;
    showNotice(`${problem.title}: ${problem.message}`, () => void loadModels());
  }
}

/** @param {string} text @param {(() => void)} [retry] */
function showNotice(text, retry) {
  const notice = byId("notice");
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
  if (!button) return;
  switch (button.getAttribute("data-action")) {
    case "regenerate":
      regenerate();
      break;
    case "edit":
      edit();
      break;
    case "copy":
      void copy(button, log.answerOf(button)?.content ?? "");
      break;
    case "copy-code":
      void copy(button, button.closest(".code")?.querySelector("code")?.textContent ?? "");
      break;
  }
}

/** @param {Element} button @param {string} text */
async function copy(button, text) {
  const done = await copyText(text);
  button.textContent = done ? "Copied" : "Not allowed";
  announcer.say(done ? "Copied." : "Copying is not allowed here.");
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function openStorage() {
  try {
    return window.localStorage;
  } catch {
    return /** @type {any} */ ({ getItem: () => null, setItem: () => {} });
  }
}

function listen() {
  byId("ask").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    ask(question.value);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask(question.value);
  });
  question.addEventListener("input", fit);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (tip.isShown) tip.hide();
    else conversation.stop();
  });
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
    question.focus();
  });
  byId("to-end").addEventListener("click", () => log.follow());
  byId("scroller").addEventListener("scroll", () => tip.hide(), { passive: true });
  byId("new-chat").addEventListener("click", newChat);
  byId("theme").addEventListener("click", () => {
    settings.nextTheme();
    settings.save(storage);
    showTheme();
  });
  models.addEventListener("change", () => {
    settings.model = models.value;
    settings.save(storage);
  });
  window.addEventListener("pagehide", () => conversation.leave());
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) conversation.enter();
  });
  listenToSettings();
}

function listenToSettings() {
  const dialog = /** @type {HTMLDialogElement} */ (byId("settings"));
  byId("open-settings").addEventListener("click", () => {
    settings.toForm(form);
    dialog.showModal();
  });
  byId("close-settings").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // beside it
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close();
  });
  form.addEventListener("input", () => {
    settings.fromForm(form);
    settings.save(storage);
    showState();
  });
  byId("reset-settings").addEventListener("click", () => {
    settings.reset();
    settings.toForm(form);
    settings.save(storage);
    showState();
  });
}

showTheme();
byId("ideas").append(...IDEAS.map((text) => {
  const button = element("button", { type: "button", text });
  button.addEventListener("click", () => ask(text));
  return button;
}));
log.show(chat);
listen();
showState();
log.follow();
if (!matchMedia("(pointer: coarse)").matches) question.focus(); // phones would open their keyboard
void loadModels();
