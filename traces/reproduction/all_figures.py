"""Every figure, in the order of the page."""

from __future__ import annotations

from traces.reproduction import (
    cache_policies,
    figure_1,
    figure_5,
    figure_8,
    figure_9,
    figure_10,
    figure_11,
    figure_13,
    figure_14,
    figure_15,
    overload,
    table_2,
)
from traces.reproduction.figure import Figure

FIGURES: tuple[Figure, ...] = (
    table_2.FIGURE,
    figure_1.FIGURE,
    figure_5.FIGURE,
    figure_8.FIGURE,
    figure_9.FIGURE,
    figure_10.FIGURE,
    figure_11.FIGURE,
    figure_13.FIGURE,
    figure_14.FIGURE,
    figure_15.FIGURE,
    cache_policies.FIGURE,
    overload.FIGURE,
)
