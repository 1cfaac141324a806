"""What formats, codecs and level tables refuse, and with which sentence."""

from __future__ import annotations

import math

import pytest
import torch

import aurakv as kv
from tests.helpers.refusals import case, check

FORMATS = [
    case("bits", lambda w: kv.Codec(64, 7), "bits", "[2, 3, 4, 5, 6, 8, 16]", "7"),
    case("bits 1", lambda w: kv.Format.parse("k1v4", 64), "bits", "[2, 3, 4, 5, 6, 8, 16]", "1"),
    case("bits 0", lambda w: kv.Codec.value(64, 0), "bits", "0"),
    case("bits float", lambda w: kv.Codec(64, 4.0), "bits", "4.0"),
    case("bits bool", lambda w: kv.Codec(64, True), "bits", "True"),
    case("bits text", lambda w: kv.Codec(64, "4"), "bits", "4"),
    case("dim", lambda w: kv.Codec(100, 4), "head_dim", "m·2^k", "576", "100"),
    case("dim 0", lambda w: kv.Codec(0, 4), "head_dim", "0"),
    case("dim negative", lambda w: kv.Codec(-64, 4), "head_dim", "-64"),
    case("dim 8", lambda w: kv.Format.parse("k4v4", 8), "head_dim", "16", "8"),
    case("dim large", lambda w: kv.Codec(2048, 4), "head_dim", "1024", "2048"),
    case("dim float", lambda w: kv.Codec(64.0, 4), "head_dim", "64.0"),
    case("dim bool", lambda w: kv.Codec(True, 16), "head_dim", "True"),
    case("dim bool in parse", lambda w: kv.Format.parse("k4v4", True), "head_dim", "True"),
    case("dims list", lambda w: kv.Format.parse("k4v4", [64, 64]), "(key dim, value dim)", "[64, 64]"),
    case("seed bool", lambda w: kv.Codec(64, 4, seed=True), "seed", "True"),
    case("codecs", lambda w: kv.Format("k4", "v4"), "key must be a Codec", "'k4'"),
    case("dim 16 bits", lambda w: kv.Codec(0, 16), "head_dim", "1 to 1024", "0"),
    case("dims one", lambda w: kv.Format.parse("k4v4", (64,)), "head_dim", "(key dim, value dim)", "(64,)"),
    case("dims none", lambda w: kv.Format.parse("k4v4", None), "head_dim", "None"),
    case("value dim", lambda w: kv.Format.parse("k4v4", (64, 72)), "head_dim", "72"),
    case("name", lambda w: kv.Format.parse("4bit", 64), "k<bits>v<bits>", "k4:lsq/v4:f32", "'4bit'"),
    case("name none", lambda w: kv.Format.parse(None, 64), "k<bits>v<bits>", "None"),
    case("name empty", lambda w: kv.Format.parse("", 64), "k<bits>v<bits>", "''"),
    case("name order", lambda w: kv.Format.parse("v4k4", 64), "k<bits>v<bits>", "'v4k4'"),
    case("name newline", lambda w: kv.Format.parse("k4v4\n", 64), "k<bits>v<bits>"),
    case("option", lambda w: kv.Format.parse("k4:fast/v4", 64), "option of k4", "lloyd-max", "'fast'"),
    case("option at 16 bits", lambda w: kv.Format.parse("k16:lsq/v4", 64), "option of k16", "bf16", "'lsq'"),
    case("option twice", lambda w: kv.Format.parse("k4:l2:lsq/v4", 64), "k4", "scale twice", "l2:lsq"),
    case("scale", lambda w: kv.Codec(64, 4, scale="max"), "scale", "['l2', 'lsq']", "'max'"),
    case("scale dtype", lambda w: kv.Codec(64, 4, dtype=torch.bfloat16), "f16 or f32", "bf16"),
    case("scale float64", lambda w: kv.Codec(64, 4, dtype=torch.float64), "f16 or f32", "float64"),
    case("vector dtype", lambda w: kv.Codec(64, 16, dtype=torch.float64), "['f32', 'f16', 'bf16']", "float64"),
    case("parse dtype", lambda w: kv.Format.parse("k16v4", 64, dtype=torch.int8), "f32", "int8"),
    case("seed", lambda w: kv.Codec(64, 4, seed=2**64), "seed", f"from 0 to {2**64 - 1}", f"got {2**64}"),
    case("seed negative", lambda w: kv.Codec(64, 4, seed=-1), "seed", "-1"),
    case("seed in name", lambda w: kv.Format.parse(f"k4:seed{2**64}/v4", 64), "seed", str(2**64)),
    case("table", lambda w: kv.Codec(64, 4, table="gauss"), "level table", "minifloat", "'gauss'"),
    case("table width", lambda w: kv.Codec(64, 2, table="minifloat"), "'minifloat'", "[3, 4] bits", "2"),
    case("table int8 at 8", lambda w: kv.Codec(64, 8, table="int8"), "'int8'", "[2, 3, 4, 5, 6] bits", "8"),
    case("levels few", lambda w: kv.Codec(64, 2, table=(0.0, 1.0)), "4 levels", "2 bits", "got 2"),
    case("levels NaN", lambda w: kv.Codec(64, 2, table=(-1.0, 0.0, 1.0, math.nan)), "levels", "finite"),
    case("levels inf", lambda w: kv.Codec(64, 2, table=(-1.0, 0.0, 1.0, math.inf)), "levels", "finite"),
    case("levels huge", lambda w: kv.Codec(64, 2, table=(-1.0, 0.0, 1.0, 1e39)), "levels", "finite float32"),
    case("levels unsorted", lambda w: kv.Codec(64, 2, table=(-1.0, 1.0, 0.0, 2.0)), "levels", "ascending"),
    case("levels in name", lambda w: kv.Format.parse("k2:[-1,0,1,x]/v4", 64), "numbers", "commas", "x]"),
    case("levels count in name", lambda w: kv.Format.parse("k2:[-1,0,1]/v4", 64), "4 levels", "got 3"),
]


@pytest.mark.parametrize(("call", "error", "words"), FORMATS)
def test_refused(world, call, error, words):
    check(world, call, error, *words)
