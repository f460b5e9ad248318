"""Cases of reported faults whose right result is simply that of the reference (test_bugs.py)."""

from __future__ import annotations

from strategies import Case


def varlen(lengths_q, lengths_k, **facts):
    """A packed batch as its sequences, one case each."""
    return tuple(Case(n, m, **facts) for n, m in zip(lengths_q, lengths_k))


_GQA4 = dict(num_heads=8, num_kv_heads=2)
_MIXED = ("packed", "pitch+16", "swap -2 -3", "packed", "packed")

# report -> what was wrong, and the cases that must equal the reference
EQUAL = {
    3: (
        "whole early key tiles hidden from late rows",
        (Case(600, 600, 2, 2, values="equal", causal=True, window=(10, 0)),),
    ),
    5: ("first tile partly hidden", (Case(16, 16, window=(5, 0)), Case(16, 16, window=(0, 4)))),
    9: (
        "a row's first tile hidden",
        tuple(Case(2, n + 1, window=(n - 1, 0)) for n in (16, 32, 64, 128, 256)),
    ),
    13: ("lse of rows without keys", (Case(3, 0), Case(9, 3, causal=True))),
    19: (
        "NaN in the unread part of a tile",
        tuple(
            Case(8, 32, 64, 64, strides=("packed", s, s, "packed", "packed"), dtype=d)
            for s in ("rows+2", "step2 rows", "pitch+16")
            for d in ("float16", "float32")
        ),
    ),
    21: (
        "padded keys scored 0 under a low lse",
        tuple(Case(4, n + 1, 1, 8, scale=1.0, values="near -120") for n in (16, 32, 64, 128, 256)),
    ),
    23: (
        "only dq is NaN",
        varlen((76, 34, 146), (1, 1, 1), head_dim=32, head_dim_v=32, dtype="float16"),
    ),
    31: ("-1e10 does not exist in float16", (Case(9, 5, dtype="float16", causal=True),)),
    35: (
        "bf16 with most keys hidden",
        (Case(64, 64, 64, 64, dtype="bfloat16", values="peaked", window=(13, 13)),),
    ),
    37: (
        "one row against the last of many",
        tuple(
            Case(n, 130, 64, 64, dtype=d, causal=True)
            for n in (1, 130)
            for d in ("float32", "float16")
        ),
    ),
    39: ("one query, many keys, causal", (Case(1, 5, causal=True),)),
    41: ("top-left and bottom-right", (Case(1, 8, causal=True), Case(1, 8, causal="top_left"))),
    43: (
        "more queries than keys",
        (Case(9, 3, causal=True), Case(2048, 1024, 64, 64, dtype="float16", causal=True)),
    ),
    45: (
        "three queries after five cached keys",
        (Case(3, 5, causal=True), Case(3, 8, causal=True)),
    ),
    47: (
        "the diagonal crosses two key tiles",
        tuple(Case(n + 1, n + 2, causal=True) for n in (4, 16, 32, 64, 128)),
    ),
    49: (
        "right bound beyond the keys",
        (Case(9, 3, window=(None, 100)), Case(9, 3, window=(100, 100))),
    ),
    55: (
        "window with cached keys and groups",
        tuple(Case(n, 200, 64, 64, 8, 1, causal=True, window=(128, 0)) for n in (1, 2, 3, 4)),
    ),
    59: ("loads begin before the window", (Case(1, 256, window=(32, 0)),)),
    77: ("batch of zero", (Case(3, 3, 4, 4, 2, 2, (0,), (0,), (0,)),)),
    79: ("no keys", (Case(4, 0), Case(4, 0, causal=True), Case(4, 0, causal="top_left"))),
    81: (
        "backward of empty cases",
        (Case(0, 4), Case(4, 0), Case(batch_q=(0,), batch_k=(0,), batch_v=(0,))),
    ),
    83: ("keys without queries", varlen((0, 4), (3, 4))),
    85: ("queries without keys", varlen((3, 4), (0, 4), strides=("packed",) * 4 + ("rows+2",))),
    87: (
        "one token a sequence, ratio 3",
        varlen((1, 0, 1), (3, 0, 5), num_heads=9, num_kv_heads=3),
    ),
    89: (
        "as many queries as heads in a group",
        tuple(Case(4, n, causal=True, **_GQA4) for n in (4, 5, 6)),
    ),
    97: (
        "a head dim outside the fast set",
        varlen((3, 9), (3, 9), head_dim=192, head_dim_v=192, dtype="float16"),
    ),
    101: ("one batch, one head, one query", (Case(1, 128, 64, 64, dtype="float16"),)),
    103: ("backward at length 238", (Case(238, 238, 64, 64, 8, 8, dtype="bfloat16", causal=True),)),
    107: (
        "row divided by the group though not packed",
        (Case(9, 9, num_heads=4, num_kv_heads=2, causal=True),),
    ),
    109: ("ratio upside down", (Case(9, 9, **_GQA4), Case(1, 70, **_GQA4))),
    111: (
        "dk and dv not summed over the group",
        (Case(9, 9, num_heads=4), Case(9, 9, num_heads=12, dtype="float16")),
    ),
    113: (
        "fewer than 8 key heads",
        tuple(Case(1, 77, 128, 128, 4 * n, n, (3,), (3,), (3,), "bfloat16") for n in (1, 2, 4)),
    ),
    115: ("head dim 96", (Case(65, 65, 96, 96, dtype="float16"),)),
    117: (
        "head dims 40, 72, 80, 120",
        tuple(Case(33, 70, d, d, dtype="float16") for d in (40, 72, 80, 120)),
    ),
    119: ("Dv differs from D", tuple(Case(33, 70, 64, d, dtype="float16") for d in (32, 128))),
    121: (
        "default scale of the padded head dim",
        tuple(Case(5, 9, d, d, values="peaked") for d in (40, 72)),
    ),
    123: ("scale 0.0 is not the default", (Case(5, 9, scale=0.0), Case(5, 9))),
    125: (
        "gradient without causal",
        (Case(128, 128, 64, 64, dtype="float16"), Case(128, 128, 64, 64)),
    ),
    127: ("dv in k's layout", (Case(33, 33, 64, 64, 2, 2, strides=_MIXED, dtype="float16"),)),
    131: (
        "stride 0 kept as a constant",
        tuple(
            Case(
                5,
                9,
                strides=(s, s, s, s, "packed"),
                batch_q=(2,),
                batch_k=(2,),
                batch_v=(2,),
                num_heads=2,
                num_kv_heads=2,
            )
            for s in (
                "stride 0 at -3",
                "packed",
                "stride 0 at -2",
                "stride 0 at -4",
                "packed",
                "stride 0 at -1",
            )
        ),
    ),
    133: (
        "only v is not contiguous",
        (
            Case(
                62,
                62,
                128,
                128,
                strides=("packed", "packed", "swap -2 -3", "packed", "packed"),
                num_heads=3,
                num_kv_heads=3,
            ),
        ),
    ),
    135: (
        "innermost stride is not 1",
        tuple(Case(9, 9, strides=(s, "packed", s, s, s)) for s in ("step2", "swap -1 -2")),
    ),
    137: (
        "outer axes swapped",
        (
            Case(9, 9, num_heads=2, num_kv_heads=2, strides=("swap -2 -3",) * 5),
            Case(9, 9, batch_q=(2,), batch_k=(2,), batch_v=(2,), strides=("swap 0 -2",) * 5),
        ),
    ),
    141: (
        "a different permutation each",
        (
            Case(
                33,
                33,
                24,
                24,
                2,
                2,
                (3,),
                (3,),
                (3,),
                "float16",
                strides=("fortran", "swap -2 -3", "swap 0 -2", "swap -1 -2", "offset1"),
            ),
        ),
    ),
    145: (
        "negative strides",
        tuple(Case(3, 4, 4, 4, strides=(s,) * 5) for s in ("reversed", "reversed rows")),
    ),
    149: (
        "10000 batches",
        (Case(1, 2, 128, 128, batch_q=(10000,), batch_k=(10000,), batch_v=(10000,)),),
    ),
    163: (
        "65536 batches",
        (Case(2, 2, 8, 8, batch_q=(65536,), batch_k=(65536,), batch_v=(65536,)),),
    ),
    175: (
        "batches of 2 to 8, one query",
        tuple(Case(1, 60 + n, 64, 64, 4, 2, (n,), (n,), (n,), "float16") for n in range(2, 9)),
    ),
    193: (
        "row groups with other loop counts",
        (Case(129, 463, 64, 64, causal=True, dtype="float16"),),
    ),
    215: ("more than 1024 keys", (Case(7, 1025, 64, 64, dtype="float16"),)),
    231: (
        "head dim 256 on small cards",
        (Case(256, 256, 256, 256, 2, 2, dtype="bfloat16", causal=True),),
    ),
}
