"""A GKE JobSet that trains on one TPU slice, or on several over the data-center network.

    python -m experiments.launch.gke EXP --topology v5e:4x4 --image IMAGE --bucket B
        [--slices 2] [--dry] -- OPTIONS

Each host has one pod. Kubernetes restarts a pod that ends with 143 (preempted, saved). Exit codes 2
and 3 end the JobSet, because a restart would fail again. Any other failure restarts all pods
together, up to `--retries` times. Needs kubectl, a cluster with TPU nodes and the JobSet
controller, and an image of this checkout (`make image IMAGE=...`). Rules for exit codes:
kubernetes.io/docs/tasks/job/pod-failure-policy, 2026-11.
"""

import re
import sys

from experiments.launch import door, slices
from jaxformer.errors import ConfigError

# both caches of metadata are off:
# docs.cloud.google.com/storage/docs/cloud-storage-fuse/config-file, 2026-11
CACHES = "metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
BUCKET = """\
              - name: runs
                csi:
                  driver: gcsfuse.csi.storage.gke.io
                  volumeAttributes:
                    bucketName: {bucket}
                    mountOptions: implicit-dirs,rename-dir-limit=1000000,{caches}
"""
CLAIM = """\
              - name: runs
                persistentVolumeClaim:
                  claimName: {claim}
"""
SPOT = """
                cloud.google.com/gke-spot: "true"
"""
VARIABLE = """
                env:
                - {{name: {name}, value: {text}}}"""
MANIFEST = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  ttlSecondsAfterFinished: 600 \
# then its name is free; of a JobSet that is there `kubectl apply` starts no pod
  failurePolicy:
    maxRestarts: {retries}
    rules:
      - name: wouldOnlyHappenAgain
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: {slices}
      template:
        spec:
          completionMode: Indexed
          completions: {hosts}
          parallelism: {hosts}
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob # 2: a mistake in the options, 3: the numbers went bad
                onExitCodes: {{containerName: train, operator: In, values: [2, 3]}}
              - action: Ignore # preempted, saved: this pod again
                onExitCodes: {{containerName: train, operator: In, values: [143]}}
          template:
            metadata:
              annotations:
                gke-gcsfuse/volumes: "{fuse}"
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 120
              serviceAccountName: {account}
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: {accelerator}
                cloud.google.com/gke-tpu-topology: {topology}{spot}
              containers:
              - name: train
                image: {image}
                command: {command}{variables}
                ports:
                - containerPort: 8471 # libtpu
                - containerPort: 8482 # jax.distributed
                resources:
                  requests: {{google.com/tpu: {chips}}}
                  limits: {{google.com/tpu: {chips}}}
                volumeMounts:
                - {{name: runs, mountPath: /runs}}
              volumes:
{volume}"""


def add_options(parser) -> None:
    parser.add_argument("--topology", default="", help="topology of one slice, such as v5e:4x4")
    parser.add_argument(
        "--slices",
        type=slices.count,
        default=1,
        help="number of slices (also set the experiment's --mesh.slices)",
    )
    parser.add_argument("--image", default="", help="a container image of this checkout")
    parser.add_argument(
        "--bucket", default="", help="bucket for runs, mounted by GKE's gcsfuse driver"
    )
    parser.add_argument(
        "--claim", default="", help="or a PersistentVolumeClaim with many writers (Filestore)"
    )
    parser.add_argument(
        "--account",
        default="default",
        help="Kubernetes service account with access to the bucket",
    )
    parser.add_argument("--spot", action="store_true", help="use spot nodes")
    parser.add_argument("--name", default="", help="name of the JobSet (default: the experiment's)")
    parser.add_argument(
        "--retries", type=slices.count, default=10, help="restarts that are not preemptions"
    )


def manifest(options, arguments: list[str]) -> tuple[str, list[str]]:
    """The JobSet, and what was checked of it."""
    slices.require(options.topology, "no topology: give TOPOLOGY=, such as TOPOLOGY=v5e:4x4")
    slices.require(options.image, "no image: give IMAGE=, made by `make image IMAGE=...`")
    tpu = slices.parse_slice(options.topology)
    if bool(options.bucket) == bool(options.claim):
        raise ConfigError(
            "runs must outlive their pods: give BUCKET=name or CLAIM=name, one of them"
        )
    bucket = slices.bucket_name(options.bucket) if options.bucket else ""
    for option in ("claim", "name", "account"):
        if not re.fullmatch(
            r"([a-z0-9]([a-z0-9._-]*[a-z0-9])?)?", value := getattr(options, option)
        ):
            raise ConfigError(
                f"{option.upper()}={value}: expected a plain name of letters, "
                "digits, dots and dashes"
            )
    if options.slices < 1:
        raise ConfigError(f"SLICES={options.slices}: must be at least 1")
    if not re.fullmatch(r"[A-Za-z0-9]([\w./:@-]*\w)?", options.image, re.ASCII):
        raise ConfigError(f"IMAGE={options.image}: expected the name of a container image")
    hosts = door.Hosts(
        options.slices * tpu.devices,
        options.slices * tpu.hosts,
        options.slices,
        files="image",
        mount="/runs",
        has_tpu=True,
    )
    command = door.train_command(options.experiment, arguments, "/runs", hosts)
    text = MANIFEST.format(
        name=slices.word(options.name or slices.job_name(options.experiment)),
        retries=options.retries,
        slices=options.slices,
        hosts=tpu.hosts,
        chips=tpu.chips_per_host,
        accelerator=slices.KINDS[tpu.kind].gke,
        topology=tpu.shape,
        spot=SPOT.rstrip() if options.spot else "",
        image=slices.word(options.image),
        account=slices.word(options.account),
        # Kubernetes replaces $$ by $
        command=f"[{', '.join(slices.quote(each) for each in ['python', *command.words])}]".replace(
            "$", "$$"
        ),
        variables="".join(
            VARIABLE.format(name=name, text=slices.quote(text).replace("$", "$$"))
            for name, text in command.variables.items()
        ),
        fuse=str(bool(bucket)).lower(),
        volume=(
            BUCKET.format(bucket=slices.word(bucket), caches=CACHES)
            if bucket
            else CLAIM.format(claim=slices.word(options.claim))
        ),
    )
    return text, command.facts


def launch(options, arguments: list[str]) -> int:
    text, facts = manifest(options, arguments)
    end = ["kubectl", "delete", "jobset", options.name or slices.job_name(options.experiment)]
    return slices.submit(text, ["kubectl", "apply", "-f"], options.dry, facts, end)


def main(argv: list[str] | None = None) -> int:
    return slices.main("gke", __doc__, add_options, launch, argv)


if __name__ == "__main__":
    sys.exit(main())
