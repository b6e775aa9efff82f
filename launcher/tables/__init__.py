"""Tables of measured runs, the reader's own or published ones: read, understood, predicted, and held against the cost model."""
