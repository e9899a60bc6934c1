"""The experiments of the paper: data, training, tables and figures."""
