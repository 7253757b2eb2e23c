"""For tests of your own: real daemons on this host, for as long as a `with` block lasts.

    import collectived as cd

    def test_the_mean_is_the_mean():
        with cd.testing.local(workers=2) as job:
            assert job.run(lambda group: group.all_reduce("mean", float(group.rank)), ranks=4) == [1.5] * 4

With pytest, the fixture `collectived_job` is such a job with two workers, shared by the tests of a module.
"""

from collectived.testing.local import LocalJob, local

__all__ = ["LocalJob", "local"]
