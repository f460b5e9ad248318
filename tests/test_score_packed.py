"""Scores of packed sequences as kernels compute them, compiled for the host: b, i and j of a pair
are those of its own sequence, in both forms of ``struct Score``.
"""

import subprocess
from dataclasses import replace

import numpy as np
import pytest
from test_compile_packed import program
from test_kernel_dropout import COMPILER
from test_plan import HOPPER, problem_of
from test_score_rows import HOST, _header

from cuflash import params
from cuflash.families import Access, sm90
from cuflash.score import Arg, Expr, evaluate, fetch

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the host")

ROWS = 48
Q_STARTS, K_STARTS = np.array([0, 13, 13]), np.array([0, 5, 30])  # sequence 1 has no queries
MAIN = """
int main() {
    static int4 q_places[304], k_places[304];
    for (int n = 0; n < 48; ++n) {
        const int of_query = n < 13 ? 0 : 2, of_key = n < 5 ? 0 : n < 30 ? 1 : 2;
        q_places[n] = {of_query, starts_q[of_query], starts_k[of_query], 0};
        k_places[n] = {of_key, starts_q[of_key], starts_k[of_key], 0};
    }
    static float table[15];
    for (int n = 0; n < 15; ++n) table[n] = n * n * 0.125f;
    Params p{};
    p.q_places = q_places, p.k_places = k_places, p.seqlen_q = p.seqlen_k = 48, p.scale = 0.5;
    p.arg0 = table, p.arg0_size0 = 3, p.arg0_size1 = 5, p.arg0_stride0 = 5, p.arg0_stride1 = 1;
    const Score score(p, 0, 0);
    for (int i = 0; i < 48; ++i)
        for (int j = 0; j < 48; ++j) {
            const Score::Query q[2] = {score.query(i), score.query(i)};
            const Score::Ahead<6> ahead{};
            const Key key{j % 8 / 2 * 2 - Score::first_key(q[0]), j - j % 8 / 2 * 2};
            const auto at = Score::elements(p, ahead, q[0], 0, 0, 0, key);
            const float s = 0.25f * (i - j);
            printf("%.9g %.9g %d %d\\n", score.value(score.scaled(s), i, j),
                   Score::value<false>(p, s, q[0], key, at), score.visible(i, j),
                   Score::visible(p, q[0], key, at));
        }
}
"""


def test_both_forms_count_in_their_sequence(tmp_path):
    table = Arg("free", "float32", 2, "score_args[0]")
    made = program(
        lambda s, b, h, i, j: s * Expr(fetch(0, table, (b.node, (j % 5).node)))
        + np.where(b > 1, 0.5, 0.25) * (i - j) + np.where(i < 7, 1.0, 0.0),
        [table],
        lambda b, h, i, j: ((i + 2 * j + b) % 5 != 0) & (j <= i + 20),
    )
    problem = replace(problem_of("bfloat16", length=ROWS), program=made, sequences=3, scale=0.5)
    plan = sm90.forward_plan(problem, HOPPER, Access(16, 16))
    starts = "\n".join(
        f"const int starts_{name}[] = {{{', '.join(map(str, x))}}};"
        for name, x in (("q", Q_STARTS), ("k", K_STARTS))
    )
    headers = [_header(n) for n in ("band.cuh", "interval.cuh", "program.cuh", "score_keys.cuh")]
    parts = [HOST, *headers, params.text(plan.params, plan.operands)]
    parts += ["struct Plan { using Element = bf16; };", plan.score, starts, MAIN]
    (tmp_path / "host.cpp").write_text("\n".join(parts))
    build = [COMPILER, "-std=c++17", "-O1", "-w", "-o", "host", "host.cpp"]
    subprocess.run(build, check=True, cwd=tmp_path, timeout=120)
    text = subprocess.run(
        [tmp_path / "host"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    found = np.array([line.split() for line in text.splitlines()], float).reshape(ROWS, ROWS, 4)
    i, j = np.indices((ROWS, ROWS))
    of_query = np.where(np.arange(ROWS) < 13, 0, 2)[:, None]
    of_key = np.searchsorted(K_STARTS, np.arange(ROWS), "right") - 1
    same = of_query == of_key
    env = {
        "s": 0.125 * (i - j), "b": np.broadcast_to(of_query, i.shape), "h": np.zeros_like(i),
        "i": i - Q_STARTS[of_query], "j": j - K_STARTS[of_query],
        "args": [np.arange(15).reshape(3, 5) ** 2 * 0.125],
    }  # fmt: skip
    value, seen = evaluate(made.value, env), evaluate(made.visible, env)
    assert same.sum() > 300 and 0.3 < seen[same].mean() < 0.95
    for form in (0, 1):
        np.testing.assert_allclose(found[..., form][same], value[same], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found[..., form + 2][same], seen[same])
