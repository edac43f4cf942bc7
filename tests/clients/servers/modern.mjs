// A server of the protocol of 2026-07-28 alone, on the protocol's own library; it answers `initialize` with an error.
// Arguments: the folder with the library, and a file in which it notes acts. Once it has become another it stays so,
// also in a later process.
import { appendFileSync, existsSync, writeFileSync } from "node:fs";

const [modules, notes] = process.argv.slice(2);
const { McpServer, acceptedContent, inputRequired } = await import(
  `${modules}/@modelcontextprotocol/server/dist/index.mjs`
);
const { serveStdio } = await import(`${modules}/@modelcontextprotocol/server/dist/stdio.mjs`);
const { z } = await import(`${modules}/zod/index.js`);

const changed = `${notes}.changed`;
const about = () => (existsSync(changed) ? "Something else entirely." : "Change something.");
const note = (words) => appendFileSync(notes, `${words}\n`);
const say = (text) => ({ content: [{ type: "text", text }] });
const reads = { readOnlyHint: true };
const word = (name) => z.object({ [name]: z.string() });

serveStdio(
  () => {
    const server = new McpServer({ name: "modern", version: "1" }, { capabilities: { tools: { listChanged: true } } });

    const act = server.registerTool("act", { description: about(), inputSchema: word("what") }, ({ what }) => {
      note(`act ${what}`);
      return say(`did ${what}`);
    });

    server.registerTool(
      "ask",
      { description: "Ask the person.", inputSchema: word("question"), annotations: reads },
      ({ question }, context) => {
        const said = acceptedContent(context.mcpReq.inputResponses, "colour");
        if (said) return say(`they like ${said.colour}`);
        if (context.mcpReq.inputResponses) return say(`they said ${context.mcpReq.inputResponses.colour.action}`);
        const colour = inputRequired.elicit({ message: question, requestedSchema: word("colour") });
        return inputRequired({ inputRequests: { colour } });
      },
    );

    server.registerTool(
      "steps",
      { description: "Say how far it is.", inputSchema: word("what"), annotations: reads },
      async ({ what }, context) => {
        const progressToken = context.mcpReq._meta?.progressToken;
        for (const progress of progressToken === undefined ? [] : [1, 2])
          await context.mcpReq.notify({ method: "notifications/progress", params: { progressToken, progress, total: 2 } });
        note(`steps ${what} ${progressToken !== undefined}`);
        return say(`${what} arrived`);
      },
    );

    server.registerTool("slow", { description: "Never end.", inputSchema: word("what") }, async ({ what }, context) => {
      note(`began ${what}`);
      await new Promise((done) => context.mcpReq.signal.addEventListener("abort", done));
      note(`stopped ${what}`);
      return say("never");
    });

    server.registerTool("change", { description: "Become another.", inputSchema: z.object({}), annotations: reads }, () => {
      writeFileSync(changed, "");
      act.update({ description: about() });
      return say("changed");
    });
    return server;
  },
  { legacy: "reject" },
);
