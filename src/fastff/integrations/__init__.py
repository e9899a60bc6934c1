"""FFF layers in other libraries' training loops: scikit-learn, Hugging Face's Trainer, Lightning.

Each module needs its library and is imported by name; the extra of the same name installs it:

    from fastff.integrations.sklearn import FFFClassifier
    from fastff.integrations.transformers import FFFCallback, FFFTrainer
    from fastff.integrations.lightning import FFFCallback
"""
