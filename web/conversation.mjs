// One conversation with the server: asks, streams, runs tools, goes on, stops. No DOM in here.

import { Answer } from "./answer.mjs";
import { ApiProblem, streamChat } from "./api.mjs";
import { StorageFull } from "./chats/library.mjs";
import { runTool } from "./tools.mjs";

const MAX_ROUNDS = 8; // of tool calls to one question
const SAVE_EVERY_MS = 1000;

/**
 * @typedef {object} Listener
 * @property {(answer: Answer) => void} onBegin
 * @property {(answer: Answer) => void} onChange
 * @property {(answer: Answer) => void} onEnd
 * @property {() => Promise<boolean>} onKeyWanted asks for a key; whether there is one now
 * @property {(message: string) => void} onKept what was kept in the browser, "" or why it was not
 */

export class Conversation {
  /** @type {AbortController | null} */
  #running = null;
  #savedAt = 0;
  #isLeft = false;
  /** @type {Answer | null} */
  #current = null;

  /**
   * @param {import("./chats/chat.mjs").Chat} chat
   * @param {import("./settings.mjs").Settings} settings
   * @param {Listener} listener
   * @param {import("./chats/library.mjs").Library} library
   */
  constructor(chat, settings, listener, library) {
    this.chat = chat;
    this.settings = settings;
    this.listener = listener;
    this.library = library;
  }

  get isRunning() {
    return this.#running !== null;
  }

  stop() {
    this.#running?.abort();
  }

  /** Keep a conversation in the browser; where there is no room, say so and go on. */
  save(chat = this.chat) {
    if (this.#isLeft) return;
    let message = "";
    try {
      this.library.save(chat);
    } catch (error) {
      if (!(error instanceof StorageFull)) throw error;
      message = error.message;
    }
    this.listener.onKept(message);
  }

  /** Go over to another conversation; what streams into this one is stopped. @param {import("./chats/chat.mjs").Chat} chat */
  open(chat) {
    this.stop();
    this.chat = chat;
  }

  /** The page goes: what it has now is kept, not what becomes of it while it is torn down. */
  leave() {
    this.save();
    this.#isLeft = true;
  }

  /** The page is back, as it was. */
  enter() {
    this.#isLeft = false;
    this.save();
  }

  /**
   * Answer what was asked last, in as many rounds as the model calls tools; or, continuing, let the
   * model go on with its last answer.
   * @param {boolean} [continuing]
   */
  async run(continuing = false) {
    if (this.#running) return;
    const running = new AbortController();
    this.#running = running;
    const { chat } = this;
    try {
      for (let round = 0; round < MAX_ROUNDS; round += 1) {
        const answer = await this.#answer(chat, running.signal, continuing && !round);
        if (answer.state !== "done" || !answer.calls.length) return;
        runCalls(answer);
        this.listener.onChange(answer);
        if (round === MAX_ROUNDS - 1) {
          answer.problem = {
            title: "Stopped here",
            message: `The model called tools ${MAX_ROUNDS} times in a row.`,
          };
          this.listener.onChange(answer);
        }
      }
    } finally {
      this.#running = null;
      this.save(chat);
      if (this.#current) this.listener.onEnd(this.#current);
    }
  }

  /** @param {import("./chats/chat.mjs").Chat} chat @param {AbortSignal} signal @param {boolean} continuing */
  async #answer(chat, signal, continuing) {
    const answer = (continuing && chat.lastAnswer) || new Answer(this.settings.model, 0);
    if (continuing) answer.resume(performance.now());
    const body = {
      model: this.settings.model,
      messages: chat.messages(this.settings.system),
      ...this.settings.fields(),
      ...(continuing ? { continue_final_message: true, add_generation_prompt: false } : {}),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    answer.sentAt = performance.now();
    this.#current = answer;
    if (!continuing) chat.add(answer);
    this.save(chat);
    this.listener.onBegin(answer);
    try {
      await this.#stream(chat, answer, body, signal);
      answer.state = answer.problem ? "failed" : "done";
    } catch (error) {
      if (signal.aborted) {
        answer.state = "stopped";
      } else {
        answer.state = "failed";
        answer.problem = problemIn(error);
      }
    }
    answer.times.end = performance.now() - answer.sentAt;
    this.listener.onChange(answer);
    return answer;
  }

  /** @param {import("./chats/chat.mjs").Chat} chat @param {Answer} answer @param {object} body @param {AbortSignal} signal */
  async #stream(chat, answer, body, signal) {
    const onHeaders = () => {
      answer.times.headers = performance.now() - answer.sentAt;
    };
    for (;;) {
      try {
        for await (const chunks of streamChat(body, signal, onHeaders)) {
          const now = performance.now();
          for (const chunk of chunks) answer.take(chunk, now);
          this.listener.onChange(answer);
          if (now - this.#savedAt > SAVE_EVERY_MS) {
            this.#savedAt = now;
            this.save(chat);
          }
        }
        return;
      } catch (error) {
        const wantsKey = error instanceof ApiProblem && error.status === 401;
        if (!wantsKey || signal.aborted || !(await this.listener.onKeyWanted())) throw error;
        answer.sentAt = performance.now(); // typing a key is none of the server's time
      }
    }
  }
}

/** @param {Answer} answer */
function runCalls(answer) {
  answer.calls.forEach((call, index) => {
    call.id ||= `call_${index}`;
    Object.assign(call, runTool(call.name, call.arguments));
  });
}

/** @param {unknown} error @returns {import("./answer.mjs").Problem} */
function problemIn(error) {
  if (error instanceof ApiProblem) return error.problem;
  return { title: "The page failed", message: error instanceof Error ? error.message : String(error) };
}
