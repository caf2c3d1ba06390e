"""The dock of many processes: a warehouse per node, a controller per worker state, no central actor.

arena, journal,     memory of a warehouse: shared segments, the record of what lies where, and what writers are
reservations        filling
warehouse, credits  cells of one node; says what it commits in numbered records; what it may still take in
controller          one state's view of those records: what is ready, leased, done
frames, channel,    messages, the calling side and the answering side of a connection
service,
conversation
hosting,            warehouse and controllers behind the service of one process: what they have in common, a method
warehouse_calls,    for each kind of message, and the records that go out to other processes
controller_calls,
outbox
client              `Dock` for a rank
ray_nodes,          a warehouse in a process that Ray places and restarts, and the process that keeps Ray for a
ray_keeper          rank
"""
