"""The experiments of the paper: data sets, training, a store of results, and the report."""
