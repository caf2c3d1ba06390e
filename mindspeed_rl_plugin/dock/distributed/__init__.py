"""The dock of many processes: a warehouse per node, a controller per worker state, no central actor.

    arena, journal      memory of a warehouse: shared segments and the record of what lies where
    warehouse           cells of one node; says what it commits in numbered records
    controller          one state's view of those records: what is ready, leased, done
    frames, channel,    messages, the calling side and the answering side of a connection
    service
    hosting             warehouse and controllers behind the service of one process
    client              `Dock` for a rank
    ray_nodes,          a warehouse in a process that Ray places and restarts, and the process that keeps Ray for a
    ray_keeper          rank
"""
