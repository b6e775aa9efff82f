"""Tables of measured runs in canonical columns: read and written, predicted row by row, and held against the cost model."""
