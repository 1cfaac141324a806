"""What a Scoring refuses, and which numbers it takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import aurakv as kv
from tests.helpers.refusals import case, check

SCORINGS = [
    case("window 0", lambda w: kv.Scoring(window=0), "window", "at least 1", "0"),
    case("window negative", lambda w: kv.Scoring(window=-3), "window", "at least 1", "-3"),
    case("window float", lambda w: kv.Scoring(window=2.5), "window", "whole", "2.5"),
    case("window NaN", lambda w: kv.Scoring(window=math.nan), "window", "whole", "nan"),
    case("softcap 0", lambda w: kv.Scoring(softcap=0.0), "softcap", "positive", "0.0"),
    case("softcap negative", lambda w: kv.Scoring(softcap=-30.0), "softcap", "positive", "-30"),
    case("softcap NaN", lambda w: kv.Scoring(softcap=math.nan), "softcap", "finite", "nan"),
    case("softcap inf", lambda w: kv.Scoring(softcap=math.inf), "softcap", "finite", "inf"),
    case("scale", lambda w: kv.Scoring(scale=math.inf), "scale", "finite", "inf"),
    case("scale NaN", lambda w: kv.Scoring(scale=math.nan), "scale", "finite", "nan"),
    case("sinks", lambda w: kv.Scoring(window=4, sinks=-1), "sinks", "-1"),
    case("first", lambda w: kv.Scoring(first=-1), "first", "-1"),
    case("recent", lambda w: kv.Scoring(recent=-2), "recent", "-2"),
    case("window bool", lambda w: kv.Scoring(window=True), "window", "whole", "True"),
    case("sinks text", lambda w: kv.Scoring(window=4, sinks="1"), "sinks", "whole", "'1'"),
    case("sinks none", lambda w: kv.Scoring(window=4, sinks=None), "sinks", "whole", "None"),
    case("softcap text", lambda w: kv.Scoring(softcap="5"), "softcap", "finite number", "'5'"),
    case("softcap bool", lambda w: kv.Scoring(softcap=True), "softcap", "finite number", "True"),
    case("scale text", lambda w: kv.Scoring(scale="5"), "scale", "finite number", "'5'"),
    case("scale many", lambda w: kv.Scoring(scale=torch.ones(2)), "scale", "finite number", "a tensor [2]"),
    case("scale huge", lambda w: kv.Scoring(scale=10**400), "scale", "finite number"),
    case("causal", lambda w: kv.Scoring(causal="no"), "causal must be a bool", "'no'"),
    case("causal number", lambda w: kv.Scoring(causal=0), "causal must be a bool", "0"),
    case("only_uncompressed", lambda w: kv.Scoring(only_uncompressed=None), "only_uncompressed must be a bool", "None"),
    case("threshold none", lambda w: kv.Scoring(threshold=None), "threshold", "finite number", "None"),
    case("threshold text", lambda w: kv.Scoring(threshold="0"), "threshold", "finite number", "'0'"),
    case("threshold 1", lambda w: kv.Scoring(threshold=1.0), "threshold", "below 1", "1.0"),
    case("threshold negative", lambda w: kv.Scoring(threshold=-0.1), "threshold", "at least 0", "-0.1"),
    case("threshold NaN", lambda w: kv.Scoring(threshold=math.nan), "threshold", "nan"),
]


@pytest.mark.parametrize(("call", "error", "words"), SCORINGS)
def test_refused(world, call, error, words):
    check(world, call, error, *words)


def test_other_numbers_are_plain_ones_inside():
    scoring = kv.Scoring(scale=np.float32(0.5), softcap=torch.tensor(30.0), threshold=0)
    assert scoring == kv.Scoring(scale=0.5, softcap=30.0)
    assert {type(x) for x in (scoring.scale, scoring.softcap, scoring.threshold)} == {float}
