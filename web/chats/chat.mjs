// A conversation as data: a tree of questions and answers, of which one branch is shown and sent.

import { Answer } from "../answer.mjs";
import { withFiles } from "../attachments.mjs";

/**
 * @typedef {import("../attachments.mjs").AttachedFile} AttachedFile
 * @typedef {{role: "root", parent: -1, next: number}
 *         | {role: "user", parent: number, next: number, content: string, files: AttachedFile[]}
 *         | {role: "assistant", parent: number, next: number, answer: Answer}} Turn
 *          `parent` comes before it in the list; `next` is the child on the branch that is shown, -1
 *          where it ends
 */

const MAX_TITLE_CHARACTERS = 60;
const MAX_TURNS = 5000;
const ID = /^[\w-]{1,64}$/;

export class Chat {
  constructor() {
    this.id = newId();
    this.ownTitle = ""; // as the user named it
    this.changedAt = Date.now();
    /** @type {Turn[]} The first is the root, which is nobody's. */
    this.turns = [{ role: "root", parent: -1, next: -1 }];
  }

  get title() {
    if (this.ownTitle) return this.ownTitle;
    const first = this.branch().find((index) => this.turns[index].role === "user");
    return first === undefined ? "" : titleOf(/** @type {any} */ (this.turns[first]));
  }

  get isEmpty() {
    return this.turns.length === 1;
  }

  /** The places of the turns that are shown, in their order. */
  branch() {
    const found = [];
    for (let at = this.turns[0].next; at >= 0; at = this.turns[at].next) found.push(at);
    return found;
  }

  /** All versions of a turn, itself among them. @param {number} index */
  versions(index) {
    const { parent } = this.turns[index];
    return this.turns.flatMap((turn, at) => (turn.parent === parent ? [at] : []));
  }

  /** Show another version, with what followed it. @param {number} index */
  show(index) {
    const turn = this.turns[index];
    if (turn?.parent >= 0) this.turns[turn.parent].next = index;
  }

  /**
   * Ask at the end of the branch, or in the place of another question, which begins a new branch.
   * @param {string} content @param {AttachedFile[]} [files] @param {number} [insteadOf]
   */
  ask(content, files = [], insteadOf = -1) {
    const parent = this.turns[insteadOf]?.parent ?? this.#leaf();
    this.#add({ role: "user", parent, next: -1, content, files });
  }

  /** @param {Answer} answer */
  add(answer) {
    this.#add({ role: "assistant", parent: this.#leaf(), next: -1, answer });
  }

  /** Go back to the last question, and return whether there is one; its answers stay as a version. */
  askAgain() {
    const last = this.branch().findLast((index) => this.turns[index].role === "user");
    if (last === undefined) return false;
    const answered = this.turns[last].next;
    this.turns[last].next = -1;
    const turn = this.turns[answered];
    const isNewest = answered === this.turns.length - 1;
    if (isNewest && turn.role === "assistant" && turn.answer.isEmpty) this.turns.pop(); // nothing to come back to
    return true;
  }

  /** The answer at the end of the branch. */
  get lastAnswer() {
    const turn = this.turns[this.#leaf()];
    return turn.role === "assistant" ? turn.answer : null;
  }

  /**
   * Build the messages of a request. Reasoning stays here, as models expect it; answers that broke
   * off go with what they have, and those that have nothing do not.
   * @param {string} system
   */
  messages(system) {
    /** @type {object[]} */
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const index of this.branch()) {
      const turn = this.turns[index];
      if (turn.role === "user") messages.push({ role: "user", content: withFiles(turn.content, turn.files) });
      else if (turn.role === "assistant") messages.push(...answered(turn.answer));
    }
    return messages;
  }

  /** All texts of all branches, for searching. */
  texts() {
    return this.turns.flatMap((turn) => {
      if (turn.role === "user") return [turn.content, ...turn.files.flatMap((file) => [file.name, file.text])];
      return turn.role === "assistant" ? [turn.answer.content] : [];
    });
  }

  toJSON() {
    const { id, ownTitle, changedAt, turns } = this;
    return { id, title: ownTitle, changedAt, turns };
  }

  /**
   * Make a conversation of what was kept or brought; what is wrong with it is thrown as an Error
   * that says where.
   * @param {any} kept
   */
  static from(kept) {
    const chat = new Chat();
    check(kept !== null && typeof kept === "object", "a conversation should be an object");
    if (typeof kept.id === "string" && ID.test(kept.id)) chat.id = kept.id;
    chat.ownTitle = typeof kept.title === "string" ? kept.title.slice(0, 200) : "";
    chat.changedAt = Number.isFinite(kept.changedAt) ? kept.changedAt : Date.now();
    check(Array.isArray(kept.turns) && kept.turns.length > 0, "turns should be a list, and not empty");
    check(kept.turns.length <= MAX_TURNS, `there may be ${MAX_TURNS} turns at most`);
    chat.turns = kept.turns.map(turnOf);
    chat.turns.forEach(({ next }, index) => {
      check(next === -1 || chat.turns[next]?.parent === index, `turns[${index}].next should be one of its answers`);
    });
    return chat;
  }

  #leaf() {
    return this.branch().at(-1) ?? 0;
  }

  /** @param {Turn} turn */
  #add(turn) {
    this.turns.push(turn);
    this.turns[turn.parent].next = this.turns.length - 1;
    this.changedAt = Date.now();
  }
}

/** @param {any} kept @param {number} index @returns {Turn} */
function turnOf(kept, index) {
  const where = `turns[${index}]`;
  check(kept !== null && typeof kept === "object", `${where} should be an object`);
  const next = Number.isInteger(kept.next) ? kept.next : -1;
  if (!index) return { role: "root", parent: -1, next };
  const { parent, role } = kept;
  check(Number.isInteger(parent) && parent >= 0 && parent < index, `${where}.parent should be the place of a turn before it`);
  if (role === "user") {
    check(typeof kept.content === "string", `${where}.content should be a string`);
    const files = Array.isArray(kept.files) ? kept.files : [];
    for (const file of files) check(typeof file?.name === "string" && typeof file.text === "string", `${where}.files should have a name and a text each`);
    return { role, parent, next, content: kept.content, files: files.map(({ name, text }) => ({ name, text })) };
  }
  check(role === "assistant", `${where}.role should be "user" or "assistant"`);
  check(kept.answer !== null && typeof kept.answer === "object", `${where}.answer should be an object`);
  return { role, parent, next, answer: Answer.from(kept.answer) };
}

/** @param {boolean} isSound @param {string} expected */
function check(isSound, expected) {
  if (!isSound) throw new Error(expected);
}

/** The first line of a question, without Markdown's marks. @param {{content: string, files: AttachedFile[]}} question */
function titleOf({ content, files }) {
  const line = content.split("\n").map((each) => each.replace(/^[\s>#*-]+|[*`_]+/g, "").trim()).find(Boolean);
  const title = line ?? files[0]?.name ?? "";
  if (title.length <= MAX_TITLE_CHARACTERS) return title;
  return `${title.slice(0, MAX_TITLE_CHARACTERS).replace(/\s+\S*$/, "")}…`;
}

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @param {Answer} answer @returns {object[]} */
function answered(answer) {
  const calls = answer.calls.filter((call) => call.result !== undefined);
  if (!calls.length) return answer.content ? [{ role: "assistant", content: answer.content }] : [];
  return [
    {
      role: "assistant",
      content: answer.content || null,
      tool_calls: calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments || "{}" },
      })),
    },
    ...calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result })),
  ];
}
