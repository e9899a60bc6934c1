"""FFF layers in other libraries: scikit-learn, Hugging Face's Trainer, PEFT and Hub, Lightning.

Each module needs its library and is imported by name; the extra of the same name installs it:

    from fastff.integrations.sklearn import FFFClassifier
    from fastff.integrations.transformers import FFFCallback, FFFTrainer
    from fastff.integrations.peft import get_peft_model
    from fastff.integrations.hub import FFFHubMixin  # with the extra transformers
    from fastff.integrations.lightning import FFFCallback
"""
