"""The way of one token through an MoE layer of four ranks: dispatched to two experts, computed, combined."""

from __future__ import annotations

from svg import Colours, Drawing

RANKS, EXPERTS_PER_RANK = 4, 2
HOME, CHOSEN = 0, {3: "0.7", 6: "0.3"}
"""The token's rank; its experts, and the weights that the router gave them."""
LANE, TOP, HEIGHT = 58, 52, 44
"""Distance of two ranks, y of the first, and the height of a rank's boxes."""


def draw(colours: Colours) -> Drawing:
    picture = Drawing(830, 330, "A token on rank 0 is dispatched to two experts, computed there, and combined at home")
    columns = {"tokens": 84, "experts": 345, "outputs": 700}
    for x, heading in ((120, "router"), (232, "dispatch"), (415, "experts compute"), (602, "combine")):
        picture.text(x, 30, heading, colours.text, size=15, anchor="middle", bold=True)
    for rank in range(RANKS):
        y = TOP + rank * LANE
        picture.text(14, y + 27, f"rank {rank}", colours.faint)
        picture.box(columns["tokens"], y, 72, HEIGHT, frame=colours.faint, radius=6)
        picture.box(columns["outputs"], y, 100, HEIGHT, frame=colours.faint, radius=6)
        for place in range(EXPERTS_PER_RANK):
            expert = rank * EXPERTS_PER_RANK + place
            x, colour, top = columns["experts"], chosen_colour(colours, expert), middle(expert) - 10.5
            picture.box(x, top, 140, 21, fill=colour or "none", frame=colour or colours.faint, radius=5)
            picture.text(x + 70, top + 15, f"expert {expert}", "#ffffff" if colour else colours.faint,
                         anchor="middle", bold=bool(colour))  # fmt: skip
    home = TOP + HOME * LANE + HEIGHT / 2
    picture.text(120, home + 5, "token x", colours.text, anchor="middle", bold=True)
    picture.text(750, home + 5, "y", colours.text, anchor="middle", bold=True)
    for expert, weight in CHOSEN.items():
        x, y = columns["experts"], middle(expert)
        colour = chosen_colour(colours, expert) or colours.text
        picture.arrow([(158, home), (240, home), (250, y), (x - 3, y)], colour)
        picture.arrow([(x + 142, y), (620, y), (590, home), (696, home)], colour)
        picture.text(x + 152, y + 17, f"· {weight}", colour, bold=True)
    below = TOP + RANKS * LANE + 12
    picture.text(415, below, "y = 0.7 · expert 3(x) + 0.3 · expert 6(x)", colours.text, anchor="middle")
    picture.text(415, below + 22, "All ranks send, compute and sum at the same time, each for its own tokens.",
                 colours.faint, anchor="middle")  # fmt: skip
    return picture


def middle(expert: int) -> float:
    """The y of an expert's middle; those of a rank lie one above the other."""
    rank, place = divmod(expert, EXPERTS_PER_RANK)
    return TOP + rank * LANE + 10.5 + 23 * place


def chosen_colour(colours: Colours, expert: int) -> str | None:
    return colours.accents[list(CHOSEN).index(expert)] if expert in CHOSEN else None
