from fastff.extras import install


def test_the_command_installs_an_extra_or_the_package_of_experiments():
    assert install("cli") == 'pip install ".[cli]" in a checkout of fastff'
    assert install("reproduce") == "pip install ./reproduce in a checkout of fastff"
