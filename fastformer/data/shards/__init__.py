"""Examples on disk, in shards: `fastformer prepare` writes them, `fastformer train --train_data` reads them.

A folder of shards has an index (`manifest`), a tokenizer, the shards (`arrow_file`) and validation data. `encode` turns
blocks of text into blocks of examples, `left_out` finds duplicates and held-out examples, `deal` makes shards of the
blocks, `prepare` runs all of these, and `reading` reads the examples for a training.
"""
