"""Examples on disk, in shards: made by `fastformer prepare`, read by `fastformer train --train_data`.

A folder of shards has an index (`manifest`), a tokenizer, the shards (`arrow_file`) and validation data. `encode` turns
blocks of text into blocks of examples, `left_out` finds duplicates and what is held out, `deal` makes shards of the
blocks, `prepare` runs all of it, and `reading` hands examples to a training.
"""
