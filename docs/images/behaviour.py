"""Draws behaviour.svg: the table of logits of one query, and its two-way analysis of variance, for three heads."""

from pathlib import Path

import torch

N, D, CELL, GAP = 10, 8, 15, 26
torch.manual_seed(3)
q = torch.randn(N, D, dtype=torch.float64)
k = torch.randn(N, D, dtype=torch.float64) + 0.8
place = torch.arange(N)
heads = [
    ("ALiBi", None, -0.6 * place.double()),
    ("RoPE, θ = 1", torch.full((D // 2,), 1.0, dtype=torch.float64), None),
    ("RoPE, θ = 0.01", torch.full((D // 2,), 0.01, dtype=torch.float64), None),
]


def table(frequencies: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """M [content m, position j] of the last query."""
    i = N - 1
    if frequencies is None:
        logits = (k @ q[i]).unsqueeze(1).expand(N, N).clone()
    else:
        pairs = torch.view_as_complex(q[i].view(-1, 2)) * torch.view_as_complex(k.view(N, -1, 2)).conj()
        turns = torch.exp(1j * (i - place).unsqueeze(1) * frequencies)
        logits = (pairs @ turns.T).real
    return logits if bias is None else logits + bias[i - place]


def shade(value: float, limit: float) -> str:
    """Blue below 0, red above, white at 0."""
    share = max(-1.0, min(1.0, value / limit))
    low, high = (255, 255, 255), (178, 24, 43) if share > 0 else (33, 102, 172)
    return "#" + "".join(f"{round(a + (b - a) * abs(share)):02x}" for a, b in zip(low, high, strict=True))


side = N * CELL
left, top = 138, 46
width, height = left + 4 * (side + GAP), top + 3 * (side + GAP + 14)
parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
    f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
]
for column, title in enumerate(("all logits M", "position P", "content S", "interaction I")):
    x = left + column * (side + GAP) + side / 2
    parts.append(f'<text x="{x}" y="20" text-anchor="middle" font-weight="bold" fill="#222">{title}</text>')
for row, (name, frequencies, bias) in enumerate(heads):
    full = table(frequencies, bias)
    mean = full.mean()
    p, s = full.mean(0, keepdim=True) - mean, full.mean(1, keepdim=True) - mean
    pieces = [full - mean, p.expand(N, N), s.expand(N, N), full - mean - p - s]
    total = pieces[0].square().sum()
    shares = [1.0, *(float(piece.square().sum() / total) for piece in pieces[1:])]
    limit = float(pieces[0].abs().max())
    y = top + row * (side + GAP + 14)
    parts.append(f'<text x="8" y="{y + side / 2}" fill="#222">{name}</text>')
    for column, (piece, share) in enumerate(zip(pieces, shares, strict=True)):
        x = left + column * (side + GAP)
        for m in range(N):
            for j in range(N):
                at = f'x="{x + j * CELL}" y="{y + m * CELL}" width="{CELL}" height="{CELL}"'
                parts.append(f'<rect {at} fill="{shade(float(piece[m, j]), limit)}"/>')
        parts.append(f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none" stroke="#999"/>')
        for j in range(N if column == 0 else 0):  # the logits that the model has: each content at its own position
            at = f'x="{x + j * CELL}" y="{y + j * CELL}" width="{CELL}" height="{CELL}"'
            parts.append(f'<rect {at} fill="none" stroke="#222"/>')
        below = "position j →" if column == 0 and row == 2 else f"{share:.0%}" if column else ""
        parts.append(f'<text x="{x + side / 2}" y="{y + side + 17}" text-anchor="middle" fill="#222">{below}</text>')
    parts.append(
        f'<text x="{left - 9}" y="{y + side / 2}" text-anchor="middle" fill="#777" '
        f'transform="rotate(-90 {left - 9} {y + side / 2})">content m</text>'
    )
parts.append("</svg>")
Path(__file__).with_name("behaviour.svg").write_text("\n".join(parts) + "\n")
