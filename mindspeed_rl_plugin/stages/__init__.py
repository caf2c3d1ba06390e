"""One file per stage: its name, the columns that it reads and writes, and one function from rows to rows."""
