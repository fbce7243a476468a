"""Sources of the join token, the certificates and the API keys in the chart's pods."""

import base64
from typing import Any

import pytest
from chart_rendering import Rendered, container, ray_containers

JOIN = "/etc/kvrelay-secrets/join"
SECRETS = {part: f"cert-{part}" for part in ("supervisor", "router", "worker", "operator")}
PARTS = {"headgroup": {"supervisor", "operator"}, "router": {"router"}, "prefill": {"worker"}, "decode": {"worker"}}


@pytest.fixture
def secured(render) -> Rendered:
    return render(
        security={"joinTokenSecret": "mine", "tls": {"enabled": True, "secrets": SECRETS}},
        transfer={"encrypt": "full"},
        router={"tlsSecret": "public", "apiKeysSecret": "keys"},
    )


def mounted(template: dict[str, Any], item: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The volumes of one container, by where they are mounted."""
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    for mount in item["volumeMounts"]:
        if mount["mountPath"].startswith("/etc/kvrelay-secrets"):
            assert mount["readOnly"] is True
    return {mount["mountPath"]: volumes[mount["name"]] for mount in item["volumeMounts"]}


def test_the_chart_makes_a_join_token_that_every_pod_reads(render, tmp_path):
    rendered = render()
    secret = rendered.one("Secret")
    token = base64.b64decode(secret["data"]["join_token"]).decode()
    assert len(token) >= 40
    assert token not in str(rendered.cluster) + str(rendered.one("ConfigMap"))
    config = rendered.config(tmp_path)
    assert config.security.join_token_path == f"{JOIN}/join_token"
    assert config.security.tls == "off"
    for template in rendered.templates.values():
        for item in ray_containers(template):
            assert mounted(template, item)[JOIN]["secret"]["secretName"] == secret["metadata"]["name"]


def test_a_named_secret_takes_its_place(secured):
    assert not secured.all("Secret")
    for template in secured.templates.values():
        for item in ray_containers(template):
            assert mounted(template, item)[JOIN]["secret"]["secretName"] == "mine"


def test_each_pod_gets_the_certificates_of_its_own_roles_only(secured, tmp_path):
    config = secured.config(tmp_path)
    assert (config.security.tls, config.transfer.encrypt) == ("mutual", "full")
    for group, template in secured.templates.items():
        for item in ray_containers(template):
            sources = mounted(template, item)[config.security.certificates]["projected"]["sources"]
            files = {file["path"] for source in sources for file in source["secret"]["items"]}
            wanted = {f"{part}.{kind}" for part in PARTS[group] for kind in ("crt", "key")}
            assert files == {"ca.crt", *wanted}
            assert {source["secret"]["name"] for source in sources} == {SECRETS[part] for part in PARTS[group]}


def test_only_the_router_has_the_public_certificate_and_the_api_keys(secured, tmp_path):
    router = secured.config(tmp_path).router
    for group, template in secured.templates.items():
        for item in ray_containers(template):
            secrets = {path: volume.get("secret", {}) for path, volume in mounted(template, item).items()}
            names = {path.rpartition("/")[2]: found.get("secretName") for path, found in secrets.items()}
            assert ("public" in names, "api-keys" in names) == (group == "router",) * 2
    assert router.tls_certificate == "/etc/kvrelay-secrets/public/tls.crt"
    assert router.tls_key == "/etc/kvrelay-secrets/public/tls.key"
    assert router.api_keys == "/etc/kvrelay-secrets/api-keys/api_keys"
    probe = container(secured.templates["router"], "ray-worker")["readinessProbe"]
    assert probe["httpGet"] == {"path": "/ready", "port": router.http_port, "scheme": "HTTPS"}
    assert "appProtocol" not in secured.named("Service", secured.name)["spec"]["ports"][0]
