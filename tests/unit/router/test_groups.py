"""Several models behind one router: who serves which, and which are loaded."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from common.messages.address import Address
from common.messages.control import Load, ModelCard, ServiceName
from services.router.errors import ApiError
from services.router.groups import Group, RegisteredWorker, groups_of, only_model, with_room

SMALL = ModelCard("small", "rev1", 1000, 512, vocabulary="words")
LARGE = ModelCard("large", "rev2", 1000, 4096, vocabulary="words")
FOREIGN = ModelCard("foreign", "rev3", 500, 512, vocabulary="mots")
OLD = ModelCard("small", "rev1", 1000)  # of a release that knows no vocabularies
READERS: tuple[ServiceName, ...] = ("tokenizer", "detokenizer")


def _worker(service: ServiceName, card: ModelCard, draining: bool = False) -> RegisteredWorker:
    address = Address("mem://x", f"{service} of {card.name}")
    return RegisteredWorker(service, address, card, Load(0, 0, 8), draining, 0, 0.0, 0.0)


def _readers(card: ModelCard) -> list[RegisteredWorker]:
    return [_worker(service, card) for service in READERS]


def _by_name(
    workers: Iterable[RegisteredWorker], served: Iterable[ModelCard] = ()
) -> dict[str, Group]:
    return {group.card.name: group for group in groups_of(workers, served)}


def test_models_of_one_vocabulary_share_tokenizers_and_detokenizers() -> None:
    computes = [_worker("compute", card) for card in (SMALL, LARGE, FOREIGN)]
    groups = _by_name([*_readers(SMALL), *computes])
    assert [group.status for group in groups.values()] == ["loaded", "loaded", "incomplete"]
    assert groups["small"].workers["tokenizer"] == groups["large"].workers["tokenizer"]
    assert [each.model for each in groups["large"].workers["compute"]] == [LARGE]
    assert groups["foreign"].missing == READERS


def test_a_worker_that_knows_no_vocabulary_serves_its_own_revision() -> None:
    groups = _by_name([*_readers(OLD), _worker("compute", SMALL), _worker("compute", LARGE)])
    assert (groups["small"].status, groups["large"].status) == ("loaded", "incomplete")
    assert not _by_name([*_readers(SMALL), _worker("compute", OLD)])["small"].missing


def test_a_model_whose_compute_is_gone_or_has_not_come_is_asleep() -> None:
    groups = _by_name(_readers(SMALL), served=[LARGE, FOREIGN])
    assert {name: group.status for name, group in groups.items()} == {
        "small": "asleep",  # of which the tokenizer's folder is
        "large": "asleep",  # which a compute had
    }
    leaving = _worker("compute", LARGE, draining=True)
    assert _by_name([*_readers(SMALL), leaving])["large"].status == "asleep"


def test_a_model_that_a_compute_loads_is_loading_until_one_takes_requests() -> None:
    coming = ModelCard("large", "rev2", 1000, vocabulary="words", loading=True)
    workers = [*_readers(SMALL), _worker("compute", coming, draining=True)]
    assert _by_name(workers)["large"].status == "loading"
    group = _by_name([*workers, _worker("compute", LARGE)])["large"]
    assert (group.status, group.card.max_model_len) == ("loaded", 4096)


def test_the_folder_of_a_tokenizer_is_no_model_beside_a_compute_of_that_name() -> None:
    quantised = ModelCard("small", "rev9", 1000, vocabulary="words")
    (group,) = groups_of([*_readers(SMALL), _worker("compute", quantised)], ())
    assert (group.card.revision, group.status) == ("rev9", "loaded")


def test_a_group_offers_the_longest_context_of_its_computes() -> None:
    longer = ModelCard("small", "rev1", 1000, 8192, vocabulary="words")
    group = _by_name([_worker("compute", longer), _worker("compute", SMALL)])["small"]
    assert group.card.max_model_len == 8192


def test_a_request_names_its_model_where_there_are_several() -> None:
    groups = groups_of([*_readers(SMALL), _worker("compute", SMALL)], [LARGE])
    assert only_model(groups) == "small"
    with pytest.raises(ApiError, match="large, small"):
        only_model(groups_of([*_readers(SMALL), *map(_compute, (SMALL, LARGE))], ()))


def _compute(card: ModelCard) -> RegisteredWorker:
    return _worker("compute", card)


def test_a_request_goes_where_there_is_room_for_it() -> None:
    longer = ModelCard("small", "rev1", 1000, 8192, vocabulary="words")
    small, large = _compute(SMALL), _compute(longer)
    assert with_room([small, large], 512) == (small, large)
    assert with_room([small, large], 513) == (large,)
    assert with_room([small, large], 9000) == (large,)  # its tokenizer says what is too long
