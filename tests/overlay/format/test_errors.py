"""Errors survive the trip between processes: engines and ranks pickle what they raise."""

import pickle

import pytest

from glm_ablit.remote import MissingFileError
from glm_exl3.cpu.replacements import EngineDriftError
from glm_exl3.format.donor import EditError
from glm_exl3.format.errors import FormatError, GlmExl3Error

PARTS = {"code": "dtype", "seen": "the dtype is F32", "why": "bits differ", "fix": "reload"}
ERRORS = [
    GlmExl3Error(**PARTS),
    EngineDriftError(**PARTS),
    EditError(**PARTS),
    MissingFileError(**PARTS),
    FormatError(**PARTS),
    FormatError(**PARTS, file="model.safetensors", tensor="a.trellis"),
]


def test_every_class_is_covered() -> None:
    def below(kind: type[GlmExl3Error]) -> set[type[GlmExl3Error]]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    assert below(GlmExl3Error) == {type(error) for error in ERRORS}


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_pickled_errors_keep_type_message_and_parts(error: GlmExl3Error) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_an_error_can_be_placed_after_it_was_made() -> None:
    placed = FormatError(**PARTS).at(tensor="a.mcg")
    assert str(placed).startswith("a.mcg: the dtype is F32.")
    assert placed.code == "dtype"
