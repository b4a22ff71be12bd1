"""`slipstream chat` and `complete`: a conversation in the terminal, and a text continued."""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from common.errors import near
from services.commands.command import Command, Parser
from services.commands.conversation import ChatAnswer, ChatSession, Screen, read_tools
from services.commands.server import (
    ServerError,
    Target,
    add_answer_options,
    add_target_options,
    answer_settings,
    with_target,
)

CHAT = """\
Talk with a model. Without MODEL or URL the server on this machine is asked, or
one is started for the small demo model and stopped at the end. What is piped
in is one question."""
CHAT_EXAMPLES = """\
examples:
  slipstream chat                                  the server here, or the demo
  slipstream chat Qwen/Qwen3-0.6B                  starts a server for it
  slipstream chat http://gpu-server:8000           a server that runs
  slipstream chat -p 'What is the capital of France?'
  slipstream chat --tools tools.json               shows the calls and asks you
                                                   for what the tools say
"""
COMPLETE = """\
Let a model continue a text, given by -p or piped in, without a chat template.
Without MODEL or URL the server on this machine is asked, or one is started for
the small demo model and stopped at the end."""
COMPLETE_EXAMPLES = """\
examples:
  slipstream complete -p 'Once upon a time'
  slipstream complete Qwen/Qwen3-0.6B --max-tokens 200 < beginning.txt
"""
HELP = """\
  /system TEXT   tell the model how to behave; without TEXT, what it was told
  /clear         begin anew
  /exit          leave, as Ctrl-D does
Enter sends. A line that begins with \"\"\" begins a text of many lines, which
ends with the next \"\"\". Ctrl-C stops an answer. Arrow keys bring back old lines.
"""
SLASH_COMMANDS = ("/help", "/system", "/clear", "/exit")
FENCE = '"""'
HISTORY = Path("~/.local/state/slipstream/chat_history")
KEPT_LINES = 1000


def add_chat_options(parser: Parser) -> None:
    add_target_options(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="how the model is to behave")
    parser.add_argument("--tools", metavar="FILE", help="tools that it may call, as JSON")
    add_answer_options(parser)
    parser.add_argument("--stats", action="store_true", help="show tokens and speed")


def chat(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    try:
        tools = read_tools(options.tools) if options.tools else []
    except (OSError, ValueError) as error:
        sys.stderr.write(f"slipstream chat: --tools {options.tools}: {error}\n")
        return 2

    def converse(target: Target) -> int:
        session = ChatSession(target, answer_settings(options), options.system, tools)
        terminal = Chat(session, options.stats)
        if options.prompt is None and sys.stdin.isatty():
            return terminal.run()
        return terminal.once(sys.stdin.read() if options.prompt is None else options.prompt)

    return with_target("chat", options, env, converse)


def add_complete_options(parser: Parser) -> None:
    add_target_options(parser)
    add_answer_options(parser)


def complete(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    prompt = options.prompt
    if prompt is None:
        if sys.stdin.isatty():
            sys.stderr.write("Type the text; Ctrl-D on an empty line ends it.\n")
        prompt = sys.stdin.read()

    def write(target: Target) -> int:
        fields = {"max_tokens": 128, **answer_settings(options)}
        body = {"model": target.model, "prompt": prompt, **fields}
        try:
            with contextlib.closing(target.api.events("/v1/completions", body)) as events:
                for event in events:
                    for choice in event.get("choices") or []:
                        print(choice.get("text") or "", end="", flush=True)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            raise
        sys.stdout.write("\n")
        return 0

    return with_target("complete", options, env, write)


class Chat:
    def __init__(self, conversation: ChatSession, shows_stats: bool) -> None:
        self._conversation = conversation
        self._shows_stats = shows_stats
        self._screen = Screen()

    def once(self, question: str) -> int:
        if not question.strip():
            raise ServerError("there is no question; give one with -p or pipe it in")
        answer = self._conversation.ask(self._screen, {"role": "user", "content": question})
        self._screen.end(self._note(answer))
        return 130 if answer.finish_reason == "interrupted" else 0

    def run(self) -> int:
        """Take questions and commands until the user leaves."""
        target = self._conversation.target
        self._screen.remark(f"{target.model} at {target.api.url}; /help says what you can type")
        save_history = _edited_lines()
        try:
            with signals_noticed():
                while (line := self._read()) is not None:
                    if line.startswith("/") and "\n" not in line:
                        if not self._command(line):
                            break
                    elif line:
                        self._ask({"role": "user", "content": line})
        finally:
            save_history()
        return 0

    def _ask(self, *messages: dict[str, str]) -> None:
        """Let the model answer; the user answers for the tools that it calls."""
        while messages:
            try:
                answer = self._conversation.ask(self._screen, *messages)
            except ServerError as error:
                self._screen.end()
                sys.stdout.write(f"That failed: {error}\n")
                return
            self._screen.end(self._note(answer))
            messages = tuple(self._result_of(call) for call in answer.calls)

    @staticmethod
    def _result_of(call: dict[str, str | dict[str, str]]) -> dict[str, str]:
        function = call["function"]
        assert isinstance(function, dict)
        try:
            result = input(f"what {function['name']} says> ")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            result = "The tool did not answer."
        return {"role": "tool", "tool_call_id": str(call["id"]), "content": result}

    def _note(self, answer: ChatAnswer) -> str:
        notes = []
        if answer.finish_reason == "interrupted":
            notes.append("stopped")
        elif answer.finish_reason == "length":
            notes.append("cut off: the longest answer that was allowed")
        if self._shows_stats and (count := answer.usage.get("completion_tokens")):
            speed = (count - 1) / max(answer.whole_s - answer.first_s, 1e-3)
            notes.append(
                f"{answer.usage.get('prompt_tokens')} tokens read, {count} written, first after "
                f"{answer.first_s:.2f} s, then {speed:.0f}/s"
            )
        return "; ".join(notes)

    def _command(self, line: str) -> bool:
        """Run a line with a slash; returns False to leave."""
        name, _, rest = line.partition(" ")
        if name == "/exit":
            return False
        if name == "/help":
            sys.stdout.write(HELP)
        elif name == "/clear":
            self._conversation.messages.clear()
            self._screen.remark("a new conversation")
        elif name == "/system":
            self._conversation.system = rest.strip() or self._conversation.system
            self._screen.remark(f"system: {self._conversation.system or '(nothing)'}")
        else:
            sys.stdout.write(f"there is no {name}{near(name, SLASH_COMMANDS)}; see /help\n")
        return True

    def _read(self) -> str | None:
        """Read a question of one or more lines; None at the end of the input."""
        try:
            line = input("> ").strip()
            if not line.startswith(FENCE):
                return line
            lines = [line.removeprefix(FENCE)]
            while not lines[-1].endswith(FENCE):
                lines.append(input("  "))
            return "\n".join(lines).removesuffix(FENCE).strip()
        except EOFError:
            sys.stdout.write("\n")
            return None
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            self._screen.remark("Ctrl-D or /exit leaves")
            return ""


@contextlib.contextmanager
def signals_noticed() -> Iterator[None]:
    """Handle signals at once, not with the next key.

    Python runs its handler when a signal interrupts the wait for a key. A signal just before the
    wait, such as Ctrl-C while the prompt is drawn, interrupts nothing. So each signal wakes a
    thread, which sends the main thread a harmless one until that has run its handlers.
    """
    noticed = False  # no Event: a handler may interrupt another one that holds its lock
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    main_thread = threading.get_ident()

    def notice(number: int, frame: FrameType | None) -> None:
        nonlocal noticed
        noticed = True

    def interrupt() -> None:
        nonlocal noticed
        while number := reader.recv(1):
            if number[0] != signal.SIGURG:
                noticed = False
                while not noticed:
                    time.sleep(0.02)
                    signal.pthread_kill(main_thread, signal.SIGURG)

    before = signal.signal(signal.SIGURG, notice)
    wakeup_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        writer.close()
        thread.join()
        signal.signal(signal.SIGURG, before)
        reader.close()


def _edited_lines() -> Callable[[], None]:
    """Let lines be edited and recalled; returns a function that saves them for this user alone."""
    try:
        import readline
    except ImportError:  # a Python that was built without it
        return lambda: None
    path = HISTORY.expanduser()
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(KEPT_LINES)

    def save() -> None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)

    return save


COMMANDS = {
    "chat": Command(CHAT, chat, add_chat_options, CHAT_EXAMPLES),
    "complete": Command(COMPLETE, complete, add_complete_options, COMPLETE_EXAMPLES),
}
