"""The forms of packed rows, and which one serves a batch."""

import numpy as np

from nereus_jax.core.layout import ParallelLayout
from nereus_jax.rl.packed_forms import PackedShape, fit_form, packed_forms

S, LONG_S = 12, 512


def test_forms_have_room_for_the_longest_sequences():
    for rows in range(1, 14):
        for degrees in ((1, 1, 1), (2, 1, 1), (3, 2, 1), (1, 4, 2)):
            for size in (1, 2, 3, 4, 8):
                forms = packed_forms(rows, S, ParallelLayout(*degrees), size, 2)
                shapes = [shape for (shape,) in forms]
                budget = shapes[0].rows * shapes[0].width
                assert all(s.rows * s.width <= budget for s in shapes)
                for shape in shapes:
                    fit = fit_form([(shape,)], np.full(rows, S))
                    assert fit.packings[0].num_rows <= shape.num_rows
                    assert fit.microbatches[0] <= shape.flushes * shape.microbatches


def test_long_and_short_rows_have_room_for_as_many_sequences_as_there_are():
    for rows in (1, 5, 8):
        for degrees in ((1, 1, 1), (2, 1, 1), (3, 2, 1)):
            *_, mixed = packed_forms(rows, LONG_S, ParallelLayout(*degrees), 4, 2)
            for lengths_B in (np.full(rows, LONG_S // 4), np.array([LONG_S] + [100] * (rows - 1))):
                fit = fit_form([mixed], lengths_B)
                for count, shape in zip(fit.microbatches, mixed, strict=True):
                    assert count <= shape.flushes * shape.microbatches


def test_wide_rows_are_taken_when_narrow_ones_stay_half_empty():
    forms = packed_forms(8, S, ParallelLayout(), 4)
    assert [(s.rows, s.width) for (s,) in forms] == [(4, S), (1, 4 * S), (2, S), (1, S)]

    def chosen(lengths: list[int]) -> PackedShape:
        (shape,) = fit_form(forms, np.array(lengths)).form
        return shape

    assert chosen([S] * 8).width == S
    assert chosen([3] * 16).width == S
    assert chosen([7] * 8).width == S, "two microbatches either way"
    forms = packed_forms(12, S, ParallelLayout(), 4)
    assert chosen([7] * 12).width == 4 * S


def test_smaller_microbatches_are_taken_when_the_last_ones_are_nearly_empty():
    forms = packed_forms(32, S, ParallelLayout(4, 1, 1), 8)
    full, some = np.full(32, S), np.array([S] * 9 + [0] * 23)
    rows = [fit_form(forms, lengths_B).form[0].rows for lengths_B in (full, some)]
    assert rows == [8, 1], "9 rows on 4 replicas: 3 each, not 8"


def test_the_first_form_within_a_tenth_of_the_best_is_taken():
    """A replica's 10 rows: 12 in microbatches of 4, 10 in those of 2, and 10 one by one."""
    forms = packed_forms(10, S, ParallelLayout(), 4)
    assert fit_form(forms, np.full(10, S)).form[0].rows == 2
    # 21 rows: 24, 22, 21. Two at a time are near enough.
    forms = packed_forms(21, S, ParallelLayout(), 4)
    assert fit_form(forms, np.full(21, S)).form[0].rows == 2


def test_short_rows_are_taken_when_the_last_row_of_every_replica_is_nearly_empty():
    def widths(pp: int, lengths: list[int]) -> list[tuple[int, int]]:
        """(width, microbatches) of every kind of rows."""
        forms = packed_forms(len(lengths), LONG_S, ParallelLayout(2, pp, 1), 1)
        fit = fit_form(forms, np.array(lengths))
        return [(s.width, n) for s, n in zip(fit.form, fit.microbatches, strict=True)]

    last = [LONG_S, LONG_S, 100, 90]
    assert widths(1, last) == [(512, 1), (128, 1)]
    assert widths(2, last) == [(512, 1), (128, 1)], "768 with a tick of 128 to fill, of 1024"
    assert widths(4, last) == [(512, 2)], "three ticks to fill: 1024 either way"
    assert widths(1, [LONG_S, LONG_S, 300, 90]) == [(512, 2)], "one is too long for a short row"
    assert widths(1, [LONG_S, LONG_S, 500, 450]) == [(512, 2)]
    assert widths(1, [100, 90, 60, 60]) == [(512, 1)], "never without a long row"


def test_sequences_of_nothing_run_one_microbatch():
    fit = fit_form(packed_forms(4, LONG_S, ParallelLayout(2, 1, 1), 2), np.zeros(4, int))
    assert fit.microbatches[0] == 1
