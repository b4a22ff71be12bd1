"""Puts a device's parts together: the runner, its scheduler, the model's card."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from common.config import LinkSettings, ModelSettings
from common.errors import ConfigError
from common.messages.control import ModelCard
from common.model_folder import locate, read_matryoshka, sampling_defaults
from common.speculative import SpeculativeSettings, read_speculative, speculative_notes
from common.tokenizer_folder import describe_worker
from services.compute.config import ComputeSettings
from services.compute.grammar.protocol import GrammarSettings
from services.compute.runner.protocol import Runner, RunnerSpec
from services.compute.runner.registry import NO_LINKS, describe_device, load_runner
from services.compute.runner.row_costs import measure, still_hold
from services.compute.scheduler.drafting import DraftPolicy
from services.compute.scheduler.policies import make_policy
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings
from services.compute.speculative import cost_file
from services.compute.speculative.controller import DraftController, FixedDrafts, first_belief
from services.compute.speculative.step_costs import StepCosts

ANY_COSTS = ("core", "follower_cores", "record_dir", "grammar_at_startup", "speculative_config")
"""Settings that may change while steps take what they took."""

KEPT_PART = 256
"""The mask worker's memory over the text of kept grammars, which take 0.4 of it when compiled."""


class ModelDevice:
    """A model folder on the device that the settings name."""

    def __init__(
        self, model: ModelSettings, settings: ComputeSettings, links: LinkSettings = NO_LINKS
    ) -> None:
        """`links`: what protects those to stages on other hosts."""
        self._model = model
        self._settings = settings
        self._links = links
        self._folder: Path = locate(model.path, model.revision)
        self._card: ModelCard | None = None

    def card(self) -> ModelCard:
        """Describe the model before it is loaded; ModelError if it is none."""
        if self._card is None:
            self._card = describe_worker(self._folder, self._model.served_name)
        return self._card

    def load(self) -> tuple[Runner, Scheduler, ModelCard, GrammarSettings]:
        """Load the weights and size everything; ModelError or ConfigError if that cannot be."""
        defaults = sampling_defaults(self._folder)  # first: the weights may take minutes
        matryoshka = read_matryoshka(self._folder)
        settings = self._settings
        speculative = read_speculative(settings.speculative_config)
        for note in speculative_notes(settings.speculative_config):
            structlog.get_logger().warning(f"speculative_config: {note}")
        runner = load_runner(self._folder, settings, self._links)
        spec = runner.spec()
        policy = make_policy(settings.schedule, settings.static_batch_window_s)
        costs = partial(self._costs, runner)
        drafts = draft_policy(speculative, runner, costs)
        scheduler = Scheduler(spec, scheduler_settings(settings, spec), policy, drafts)
        card = model_card(self.card(), settings, spec)
        card = replace(card, sampling_defaults=defaults, matryoshka=matryoshka)
        return runner, scheduler, card, grammar_settings(self._folder, settings, spec)

    def _costs(self, runner: Runner) -> StepCosts:
        """What steps take: as kept of an earlier start, if that still holds, or as measured."""
        settings = self._settings.model_dump(exclude=set(ANY_COSTS))
        speculative = read_speculative(self._settings.speculative_config)
        about = {
            "model": self.card().revision,
            "drafter": speculative.model if speculative else "",
            "settings": settings,
            **describe_device(self._settings),
        }
        file, log = cost_file.file_of(about), structlog.get_logger()
        costs = cost_file.read(file)
        if costs is not None and still_hold(costs, runner):
            log.info("step costs kept", file=str(file))
            return costs
        costs = measure(runner)
        log.info("steps measured", **costs._asdict())
        cost_file.keep(file, costs)
        return costs


def draft_policy(
    speculative: SpeculativeSettings | None,
    runner: Runner,
    costs: Callable[[], StepCosts] | None = None,
) -> DraftPolicy | None:
    """What chooses numbers of drafts: the settings, or from what steps take on this device."""
    spec = runner.spec()
    if speculative is None or not spec.max_drafts:
        return None
    if speculative.num_speculative_tokens:
        return FixedDrafts(spec.max_num_seqs, spec.max_drafts)
    step_costs = measure(runner) if costs is None else costs()
    belief = first_belief(speculative.has_weights)
    return DraftController(spec.max_num_seqs, spec.max_drafts, step_costs, *belief)


def grammar_settings(
    folder: Path | str, settings: ComputeSettings, spec: RunnerSpec
) -> GrammarSettings:
    return GrammarSettings(
        folder=str(folder),
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        num_slots=spec.max_num_seqs,
        compile_timeout_s=settings.grammar_timeout_s,
        step_timeout_s=settings.grammar_step_timeout_s,
        memory_mb=settings.grammar_memory_mb,
        cache_bytes=(settings.grammar_memory_mb << 20) // KEPT_PART,
        max_grammar_bytes=settings.max_grammar_bytes,
        cores=_cores_beside(settings.core),
    )


def _cores_beside(core: int) -> tuple[int, ...]:
    """The cores of this process without the one that its thread keeps; empty if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    cores = os.sched_getaffinity(0)
    return tuple(sorted(cores - {core} or cores))


def scheduler_settings(settings: ComputeSettings, spec: RunnerSpec) -> SchedulerSettings:
    speculative = read_speculative(settings.speculative_config)
    past_answers_bytes = 0
    if speculative is not None and settings.prefix_cache:
        past_answers_bytes = speculative.past_answers_bytes
    return SchedulerSettings(
        max_num_seqs=min(settings.max_num_seqs, spec.max_num_seqs),
        max_waiting=settings.max_waiting,
        max_prefill_tokens=settings.max_prefill_tokens
        or max(1, spec.max_step_tokens - spec.max_num_seqs),
        prefix_cache=settings.prefix_cache,
        in_flight_steps=spec.steps_ahead(settings.in_flight_steps),
        num_groups=spec.num_stages,
        forced_drafts=not (speculative and speculative.is_synthetic),
        past_answers_bytes=past_answers_bytes,
    )


def model_card(described: ModelCard, settings: ComputeSettings, spec: RunnerSpec) -> ModelCard:
    longest = spec.max_model_len - 1  # one token of room for the other side
    for name in ("max_input_length", "max_output_length"):
        if getattr(settings, name) > longest:
            raise ConfigError(
                f"[compute] {name} is {getattr(settings, name)}; at most {longest} fit into a "
                f"max_model_len of {spec.max_model_len}"
            )
    return replace(
        described,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        max_input_length=settings.max_input_length or longest,
        max_output_length=settings.max_output_length or longest,
        pooling=spec.pooling,
    )
