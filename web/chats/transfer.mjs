// Conversations as files: JSON that can be brought back, with all branches, and Markdown to read.

import { withFiles } from "../attachments.mjs";
import { Chat } from "./chat.mjs";

const FORMAT = "slipstream-chats";
const VERSION = 1;
const MAX_CHARACTERS = 20_000_000;

/** @param {Chat[]} chats */
export function toJson(chats) {
  return `${JSON.stringify({ format: FORMAT, version: VERSION, chats }, null, 1)}\n`;
}

/**
 * Read an exported file; an Error says what is wrong with it, and where.
 * @param {string} text
 * @returns {Chat[]}
 */
export function fromJson(text) {
  if (text.length > MAX_CHARACTERS) throw new Error("the file is too large");
  let kept;
  try {
    kept = JSON.parse(text);
  } catch {
    throw new Error("the file is not JSON");
  }
  if (kept?.format !== FORMAT || !Array.isArray(kept.chats)) throw new Error("the file does not come from this page's export");
  if (kept.version !== VERSION) throw new Error(`the file is of version ${JSON.stringify(kept.version)}; this page reads ${VERSION}`);
  return kept.chats.map((/** @type {any} */ each, /** @type {number} */ index) => {
    try {
      return Chat.from(each);
    } catch (error) {
      throw new Error(`chats[${index}]: ${error instanceof Error ? error.message : error}`);
    }
  });
}

/** The branch that is shown, as Markdown. @param {Chat} chat */
export function toMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  for (const index of chat.branch()) {
    const turn = chat.turns[index];
    if (turn.role === "user") parts.push("## Question", withFiles(turn.content, turn.files));
    if (turn.role !== "assistant") continue;
    const { model, reasoning, content, calls } = turn.answer;
    parts.push(model ? `## Answer of ${model}` : "## Answer");
    if (reasoning) parts.push(`> Reasoning: ${reasoning.trim().replaceAll("\n", "\n> ")}`);
    if (content) parts.push(content);
    for (const call of calls) {
      parts.push(`Called \`${call.name}\`:`, withFiles("", [{ name: "arguments.json", text: call.arguments }]));
      if (call.result !== undefined) parts.push(withFiles("", [{ name: "result.json", text: call.result }]));
    }
  }
  return `${parts.join("\n\n")}\n`;
}

/** A name for a file of that title. @param {string} title @param {string} ending */
export function fileName(title, ending) {
  const name = title.replaceAll(/[^\p{L}\p{N}]+/gu, "-").replaceAll(/^-+|-+$/g, "").slice(0, 50);
  return `${name || "conversation"}.${ending}`;
}
