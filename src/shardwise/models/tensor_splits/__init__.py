"""How the blocks of a layer are cut over the ranks of tensor parallelism: shapes only, one file per kind of block."""
