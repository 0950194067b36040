"""A GKE JobSet that trains on one TPU slice, or on several joined over the data-center network.

    python -m experiments.launch.gke EXP --topology v5e:4x4 --image IMAGE --bucket B [--slices 2] [--dry] -- OPTIONS

One pod a host. A pod that ends with 143 (preempted, saved) is started again by Kubernetes; exit codes 2 and 3 would only
happen again and end the JobSet; any other failure restarts all pods together, `--retries` times. Needs: kubectl with a
cluster that has TPU nodes and the JobSet controller, and an image of this checkout (experiments/launch/Dockerfile).
"""

import json
import re
import sys

from experiments.launch import slices
from jaxformer.errors import ConfigError

BUCKET = """\
              - name: runs
                csi:
                  driver: gcsfuse.csi.storage.gke.io
                  volumeAttributes:
                    bucketName: {bucket}
                    mountOptions: implicit-dirs,rename-dir-limit=1000000,metadata-cache:ttl-secs:0
"""
CLAIM = """\
              - name: runs
                persistentVolumeClaim:
                  claimName: {claim}
"""
SPOT = """
                cloud.google.com/gke-spot: "true"
"""
MANIFEST = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
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
                command: {command}
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


def options(parser) -> None:
    parser.add_argument("--topology", default="", help="of one slice, such as v5e:4x4")
    parser.add_argument(
        "--slices", type=int, default=1, help="how many of them (give the experiment --mesh.slices, too)"
    )
    parser.add_argument("--image", default="", help="a container image of this checkout")
    parser.add_argument("--bucket", default="", help="where runs lie: a bucket, mounted by the gcsfuse driver of GKE")
    parser.add_argument("--claim", default="", help="or a PersistentVolumeClaim that many may write (Filestore)")
    parser.add_argument("--account", default="default", help="Kubernetes service account; it must see the bucket")
    parser.add_argument("--spot", action="store_true", help="on spot nodes")
    parser.add_argument("--name", default="", help="of the JobSet; the experiment's by default")
    parser.add_argument("--retries", type=int, default=10, help="restarts that are not preemptions")


def manifest(asked, arguments: list[str]) -> str:
    slices.needed(asked.topology, "no topology: give TOPOLOGY=, such as TOPOLOGY=v5e:4x4")
    slices.needed(asked.image, "no image: give IMAGE=, built with experiments/launch/Dockerfile")
    wanted = slices.parse_slice(asked.topology)
    if bool(asked.bucket) == bool(asked.claim):
        raise ConfigError("runs must outlive their pods: give BUCKET=name or CLAIM=name, one of them")
    for option, value in (
        ("BUCKET", asked.bucket),
        ("CLAIM", asked.claim),
        ("NAME", asked.name),
        ("ACCOUNT", asked.account),
    ):
        if not re.fullmatch(r"[a-z0-9._-]*", value):
            raise ConfigError(f"{option}={value}: expected a plain name of letters, digits, dots and dashes")
    if asked.slices < 1:
        raise ConfigError(f"SLICES={asked.slices}: must be at least 1")
    if not re.fullmatch(r"[\w./:@-]+", asked.image):
        raise ConfigError(f"IMAGE={asked.image}: expected the name of a container image")
    return MANIFEST.format(
        name=asked.name or slices.name_of(asked.experiment),
        retries=asked.retries,
        slices=asked.slices,
        hosts=wanted.hosts,
        chips=wanted.chips_per_host,
        accelerator=slices.KINDS[wanted.kind].gke,
        topology=wanted.shape,
        spot=SPOT.rstrip() if asked.spot else "",
        image=asked.image,
        account=asked.account,
        command=json.dumps(["python", *slices.training(asked.experiment, arguments, "/runs")]),
        fuse=str(bool(asked.bucket)).lower(),
        volume=(BUCKET.format(bucket=asked.bucket) if asked.bucket else CLAIM.format(claim=asked.claim)),
    )


def launch(asked, arguments: list[str]) -> int:
    return slices.submit(manifest(asked, arguments), ["kubectl", "apply", "-f"], asked.dry)


def main(argv: list[str] | None = None) -> int:
    return slices.main("gke", __doc__, options, launch, argv)


if __name__ == "__main__":
    sys.exit(main())
