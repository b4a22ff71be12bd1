import assert from "node:assert/strict";
import { test } from "node:test";

import { Answer } from "../../../web/answer.mjs";
import { readTextFile, withFiles } from "../../../web/attachments.mjs";
import { Chat } from "../../../web/chats/chat.mjs";
import { Library, StorageFull } from "../../../web/chats/library.mjs";
import { fileName, fromJson, toJson, toMarkdown } from "../../../web/chats/transfer.mjs";
import { readBlocks } from "../../../web/markdown/blocks.mjs";
import { MemoryStorage } from "../../../web/storage.mjs";

class SmallStorage extends MemoryStorage {
  room = Infinity;
  setItem(name, text) {
    if (text.length > this.room) throw new Error("full");
    super.setItem(name, text);
  }
}

function said(content, state = "done") {
  return Object.assign(new Answer("m", 0), { content, state });
}

function conversation(...texts) {
  const chat = new Chat();
  texts.forEach((text, index) => (index % 2 ? chat.add(said(text)) : chat.ask(text)));
  return chat;
}

const contents = (chat) => chat.messages("").map((message) => message.content);

test("an edited question begins a branch, and the other one can be shown again", () => {
  const chat = conversation("one", "to one", "two", "to two", "three", "to three");
  const two = chat.branch()[2];
  chat.ask("two, edited", [], two);
  chat.add(said("to the edited"));
  assert.deepEqual(contents(chat), ["one", "to one", "two, edited", "to the edited"]);
  assert.deepEqual(chat.versions(chat.branch()[2]), [two, 7]);
  chat.show(two);
  assert.deepEqual(contents(chat), ["one", "to one", "two", "to two", "three", "to three"]);
  chat.ask("one, edited", [], chat.branch()[0]);
  assert.deepEqual(contents(chat), ["one, edited"]);
  chat.show(1);
  assert.deepEqual(contents(chat), ["one", "to one", "two", "to two", "three", "to three"]);
});

test("an answer that is made again is another version, unless nothing of it came", () => {
  const chat = conversation("one", "first");
  assert.equal(chat.askAgain(), true);
  chat.add(said("", "failed"));
  chat.askAgain();
  chat.add(said("second"));
  assert.deepEqual(contents(chat), ["one", "second"]);
  assert.equal(chat.versions(chat.branch()[1]).length, 2);
  assert.equal(new Chat().askAgain(), false);
});

test("a conversation is kept and comes back with all branches; what streamed was interrupted", () => {
  const library = new Library(new MemoryStorage());
  const chat = conversation("q", "a");
  chat.ask("other", [{ name: "a.py", text: "x" }], 1);
  chat.add(said("half", "streaming"));
  library.save(chat);
  library.setCurrent(chat);
  const found = library.openLast();
  assert.equal(found.lastAnswer.state, "interrupted");
  assert.deepEqual(contents(found), ["a.py:\n\n```py\nx\n```\n\nother", "half"]);
  found.show(1);
  assert.deepEqual(contents(found), ["q", "a"]);
  assert.equal(library.entries.length, 1);
});

test("titles are those of the first question, until there is another", () => {
  assert.equal(conversation("## **What** is `this`?\nmore").title, "What is this?");
  assert.equal(conversation("word ".repeat(40)).title.length <= 61, true);
  assert.equal(new Chat().title, "");
  const chat = conversation("x");
  chat.ownTitle = "Mine";
  assert.equal(Chat.from(JSON.parse(JSON.stringify(chat))).title, "Mine");
});

test("empty conversations are not kept", () => {
  const library = new Library(new MemoryStorage());
  library.save(new Chat());
  assert.deepEqual(library.entries, []);
});

test("all words are searched for, in all branches and files, with the place of the first", () => {
  const library = new Library(new MemoryStorage());
  const one = conversation("Whales", "A whale is a mammal that lives in the sea.");
  const two = conversation("Birds", "They fly.");
  two.ask("Mammals instead", [{ name: "notes.txt", text: "platypus" }], 1);
  for (const chat of [one, two]) library.save(chat);
  const titles = (query) => library.search(query).map((entry) => entry.title).sort();
  assert.deepEqual(titles("MAMMAL"), ["Mammals instead", "Whales"]);
  assert.deepEqual(titles("fly platypus"), ["Mammals instead"]);
  assert.deepEqual(titles("nowhere"), []);
  assert.deepEqual(titles(""), ["Mammals instead", "Whales"]);
  assert.match(library.search("lives")[0].snippet, /mammal that lives in the sea/);
});

test("what was deleted comes back", () => {
  const library = new Library(new MemoryStorage());
  const chat = conversation("q", "a");
  library.save(chat);
  const undo = library.remove(chat.id);
  assert.deepEqual([library.entries, library.open(chat.id)], [[], null]);
  undo();
  assert.equal(library.entries.length, 1);
  assert.deepEqual(contents(library.open(chat.id)), ["q", "a"]);
});

test("a full storage is said to be, and what was kept stays", () => {
  const storage = new SmallStorage();
  const library = new Library(storage);
  const chat = conversation("q", "a");
  library.save(chat);
  storage.room = 1000;
  chat.ask("x".repeat(2000));
  assert.throws(() => library.save(chat), (error) => error instanceof StorageFull && /Delete or export/.test(error.message));
  assert.deepEqual(contents(library.open(chat.id)), ["q", "a"]);
  storage.room = Infinity;
  chat.ask("y".repeat(4_600_000));
  assert.throws(() => library.save(chat), StorageFull);
});

test("there are as many conversations as there may be, and not one more", () => {
  const library = new Library(new MemoryStorage());
  const chats = Array.from({ length: 501 }, (_, index) => conversation(`question ${index}`));
  assert.throws(() => library.add(chats), /500 of 501 conversations were imported\. There is room for 500/);
  assert.equal(library.entries.length, 500);
});

test("what is exported can be imported, beside what is there", () => {
  const chat = conversation("q", "a", "q2", "a2");
  chat.ask("edited", [{ name: "a", text: "b" }], 3);
  const library = new Library(new MemoryStorage());
  library.save(chat);
  const [brought] = fromJson(toJson([chat]));
  library.add([brought]);
  assert.equal(library.entries.length, 2);
  assert.notEqual(brought.id, chat.id);
  assert.equal(JSON.stringify(brought.turns), JSON.stringify(chat.turns));
});

const turns = (...more) => JSON.stringify({ format: "slipstream-chats", version: 1, chats: [{ turns: [{ role: "root", next: -1 }, ...more] }] });
for (const [text, why] of [
  ["{", /not JSON/],
  ["[]", /does not come from this page/],
  ['{"format": "slipstream-chats", "version": 2, "chats": []}', /version 2/],
  ['{"format": "slipstream-chats", "version": 1, "chats": [7]}', /chats\[0\]: .*object/],
  ['{"format": "slipstream-chats", "version": 1, "chats": [{"turns": []}]}', /not empty/],
  [turns({ role: "user", parent: 1, content: "x" }), /turns\[1\]\.parent/],
  [turns({ role: "user", parent: 0 }), /turns\[1\]\.content/],
  [turns({ role: "user", parent: 0, content: "x", files: [1] }), /turns\[1\]\.files/],
  [turns({ role: "system", parent: 0, content: "x" }), /turns\[1\]\.role/],
  [turns({ role: "assistant", parent: 0 }), /turns\[1\]\.answer/],
  [turns({ role: "user", parent: 0, next: 1, content: "x" }), /turns\[1\]\.next/],
]) {
  test(`the import of ${text.slice(-60)} is refused with a reason`, () => assert.throws(() => fromJson(text), why));
}

test("odd answers in an import become sound ones", () => {
  const odd = { content: 5, state: "flying", calls: [null, { name: 3 }], usage: "x", problem: "y", times: { first: "z" } };
  const [chat] = fromJson(turns({ role: "assistant", parent: 0, next: -1, answer: odd }));
  const { answer } = chat.turns[1];
  assert.deepEqual([answer.content, answer.state, answer.times.first], ["", "interrupted", null]);
  assert.deepEqual(answer.calls.map(({ name }) => name), ["", ""]);
  assert.deepEqual([answer.problem.title, answer.usage.prompt], ["", 0]);
});

test("the shown branch is exported as Markdown", () => {
  const chat = conversation("What?", "That.", "And?", "This.");
  const answer = chat.lastAnswer;
  answer.reasoning = "Hm.\nSo.";
  answer.calls.push({ id: "1", name: "calculator", arguments: '{"a": 1}', result: "2" });
  const text = toMarkdown(chat);
  assert.match(text, /^# What\?\n\n## Question\n\nWhat\?\n\n## Answer of m\n\nThat\.\n\n## Question\n\nAnd\?/);
  assert.match(text, /> Reasoning: Hm\.\n> So\.\n\nThis\.\n\nCalled `calculator`:/);
});

test("file names are made of titles", () => {
  assert.equal(fileName("What is 1/2? größer…", "md"), "What-is-1-2-größer.md");
  assert.equal(fileName("/../", "json"), "conversation.json");
});

test("a file's fence is longer than any in it", () => {
  const text = withFiles("Why?", [{ name: "a.md", text: "```js\n1\n```\n" }]);
  const blocks = readBlocks(text).blocks;
  assert.deepEqual(blocks.map(({ kind }) => kind), ["paragraph", "code", "paragraph"]);
  assert.deepEqual([blocks[1].language, blocks[1].text], ["md", "```js\n1\n```"]);
});

test("only text of a bounded size is read", async () => {
  const file = (name, ...parts) => new File(parts, name);
  assert.deepEqual(await readTextFile(file("a.txt", "größer")), { name: "a.txt", text: "größer" });
  await assert.rejects(readTextFile(file("b.png", Uint8Array.of(0x89, 0x50, 0xff, 0))), /b\.png is not a text file/);
  await assert.rejects(readTextFile(file("c.txt", "a\0b")), /not a text file/);
  await assert.rejects(readTextFile(file("d.txt", "x".repeat(300_000))), /d\.txt has 293 KB; files of 256 KB at most/);
});
