"""The stages. The file of a stage has its name, the columns that it reads and writes, and what it does with rows."""
