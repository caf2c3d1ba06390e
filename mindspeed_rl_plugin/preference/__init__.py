"""Learning from given pairs (DPO): nothing is generated, so there is no engine, no dock and no grader.

`loop.PairLoop` stands in the place of `iteration.Loop`; `reference` keeps the reference's log-probs on disk.
"""
