"""What is trained of an episode whose requests fork, by what the engine was given and sampled."""


def logps_of(call, tokens):
    """Log-probs of a turn that name it."""
    return tuple(-(call + 1 + n / 1000) for n in range(len(tokens)))


def paths_of(row):
    """[(tokens, mask, logps)] of a row's paths."""
    tokens, zeros = (*row.prompt, *row.tokens), [0] * len(row.prompt)
    columns = tokens, [*zeros, *row.mask.tolist()], [*zeros, *row.logps]
    starts = row.columns["paths"].row(0)[:, 0].tolist()
    return [[column[a:b] for column in columns] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]


def version_of(segments, place):
    return [version for first, version in segments if first <= place][-1]


def check(episode, row, heard):
    """Turns that reached the agent (heard: their numbers) are trained once each, in a path that begins with the ids
    that the engine was given and sampled, and with the version that sampled them; no other token is.

    episode: with `engine.seen`, the requests, and `sampled`, completions by call, whose log-probs are `logps_of`."""
    seen, trained = {request.id.call: request for request in episode.engine.seen}, []
    starts = row.columns["paths"].row(0)[:, 0].tolist()
    assert {max(start - len(row.prompt), 0) for start in starts} <= {first for first, _ in row.segments}
    for (tokens, mask, logps), start in zip(paths_of(row), starts, strict=True):
        assert not mask[0] and all(m or not logp for m, logp in zip(mask, logps, strict=True))
        at = 0
        while at < len(mask):
            if mask[at]:
                trained.append(call := int(-logps[at]) - 1)
                turn = episode.sampled[call].tokens
                place = max(start + at - len(row.prompt), 0)
                for n in range(len(turn)):
                    assert version_of(row.segments, place + n) == version_of(episode.sampled[call].segments, n)
                assert tokens[: at + len(turn)] == (*seen[call].prompt_tokens, *turn), call
                assert logps[at : at + len(turn)] == [*logps_of(call, turn)]
                assert all(mask[at : at + len(turn)])
                at += len(turn) - 1
            at += 1
    assert sorted(trained) == sorted(heard)
    spans = [[n + len(row.prompt) for n in span] for span in row.turns]
    assert row.columns["turns"].row(0).tolist() == spans and len(spans) == len(heard)
